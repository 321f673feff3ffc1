"""What changes weights: the protocols Transform and Rounding, the statistics they may ask for, and round-to-nearest, the default."""

from quark.algorithms.rounding import Figures, HeldOut, NamesLayers, Problem, Rounding, RoundToNearest, float_weight, weight_quantizer
from quark.algorithms.statistics import AbsMax, AbsMean, CrossMoment, SecondMoment, SecondMoment64, Statistic
from quark.algorithms.transform import STAGES, BlockAtHand, Judged, Settled, Settling, Transform, input_is_transformed
from quark.algorithms.validation import OutputError, Validation, validated
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
    "NamesLayers",
    "OutputError",
    "Problem",
    "RoundToNearest",
    "Rounding",
    "SecondMoment",
    "SecondMoment64",
    "Settled",
    "Settling",
    "Statistic",
    "Transform",
    "Validation",
    "float_weight",
    "input_is_transformed",
    "validated",
    "weight_quantizer",
]

make_callable(__name__, algorithms)
