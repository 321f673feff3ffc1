"""Base classes of algorithms, classes of statistics of layer inputs, and the default rounding."""

from quark.algorithms.branching import Branching, BranchSite, BranchTask
from quark.algorithms.rounding import (
    HeldOut,
    Metrics,
    Rounding,
    RoundingTask,
    RoundToNearest,
    StackedWeights,
    float_weight,
    weight_quantizer,
)
from quark.algorithms.statistics import AbsMax, AbsMean, CrossMoment, Hessian, Hessian64, OutputMoment, Statistic
from quark.algorithms.transform import BlockContext, ResolvedSettings, Transform, TransformRun, input_is_transformed
from quark.algorithms.tuning import RoundedBlock, Sample, Tuning
from quark.algorithms.validation import OutputError, Validation, is_worse, validated
from quark.base.lazy import make_callable
from quark.plugins import algorithms

__all__ = [
    "AbsMax",
    "AbsMean",
    "BlockContext",
    "BranchSite",
    "BranchTask",
    "Branching",
    "CrossMoment",
    "HeldOut",
    "Hessian",
    "Hessian64",
    "Metrics",
    "OutputError",
    "OutputMoment",
    "ResolvedSettings",
    "RoundToNearest",
    "RoundedBlock",
    "Rounding",
    "RoundingTask",
    "Sample",
    "StackedWeights",
    "Statistic",
    "Transform",
    "TransformRun",
    "Tuning",
    "Validation",
    "float_weight",
    "input_is_transformed",
    "is_worse",
    "validated",
    "weight_quantizer",
]

make_callable(__name__, algorithms)
