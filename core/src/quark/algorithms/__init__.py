"""What changes weights: the Rounding protocol, the statistics it may ask for, and round-to-nearest, the default."""

from quark.algorithms.rounding import Figures, Problem, Rounding, RoundToNearest, float_weight, weight_quantizer
from quark.algorithms.statistics import AbsMax, AbsMean, CrossMoment, SecondMoment, SecondMoment64, Statistic
from quark.callable_module import make_callable
from quark.plugins import algorithms

__all__ = [
    "AbsMax",
    "AbsMean",
    "CrossMoment",
    "Figures",
    "Problem",
    "RoundToNearest",
    "Rounding",
    "SecondMoment",
    "SecondMoment64",
    "Statistic",
    "float_weight",
    "weight_quantizer",
]

make_callable(__name__, algorithms)
