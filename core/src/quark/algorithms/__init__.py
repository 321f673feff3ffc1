"""What changes weights: the protocols Transform and Rounding, the statistics they may ask for, and round-to-nearest, the default."""

from quark.algorithms.rounding import Figures, HeldOut, Problem, Rounding, RoundToNearest, float_weight, weight_quantizer
from quark.algorithms.statistics import AbsMax, AbsMean, CrossMoment, SecondMoment, SecondMoment64, Statistic
from quark.algorithms.transform import STAGES, BlockAtHand, Judged, Settled, Settling, Transform
from quark.callable_module import make_callable
from quark.plugins import algorithms

__all__ = [
    "STAGES",
    "AbsMax",
    "AbsMean",
    "BlockAtHand",
    "CrossMoment",
    "Figures",
    "HeldOut",
    "Judged",
    "Problem",
    "RoundToNearest",
    "Rounding",
    "SecondMoment",
    "SecondMoment64",
    "Settled",
    "Settling",
    "Statistic",
    "Transform",
    "float_weight",
    "weight_quantizer",
]

make_callable(__name__, algorithms)
