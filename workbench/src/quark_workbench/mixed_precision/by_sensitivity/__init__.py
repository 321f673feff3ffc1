"""Automatic mixed precision, which chooses the schemes with the least predicted divergence under a budget."""

from quark_workbench.mixed_precision.by_sensitivity.knapsack import pareto_curve, smallest_loss
from quark_workbench.mixed_precision.by_sensitivity.measure import measured_kl
from quark_workbench.mixed_precision.by_sensitivity.selector import MixedPrecision

__all__ = ["MixedPrecision", "measured_kl", "pareto_curve", "smallest_loss"]
