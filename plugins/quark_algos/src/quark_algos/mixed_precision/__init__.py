"""Automatic mixed precision: which scheme each layer gets, by predicted divergence, solved exactly under a budget."""

from quark_algos.mixed_precision.curve import pareto_curve
from quark_algos.mixed_precision.knapsack import smallest_loss
from quark_algos.mixed_precision.measure import measured_kl
from quark_algos.mixed_precision.selector import MixedPrecision

__all__ = ["MixedPrecision", "measured_kl", "pareto_curve", "smallest_loss"]
