"""Layers of a quantized model that stay float, by the names in lists of exclusions of runtimes."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from quark.config.model import QConfig
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan, is_left_alone

__all__ = ["is_float", "routers"]


def is_float(row: PlanRow) -> bool:
    """Return whether the layer is listed as excluded: its weight and input are float.

    Its output may still enter a quantized cache.
    """
    return is_left_alone(row) and not row.is_by_name


def routers(model: nn.Module, config: QConfig, plan: QuantPlan) -> list[str]:
    """Return excluded modules that have a weight, but are no linear layers here.

    Runtimes may implement them as linear layers.
    """
    known = {row.name for row in plan.rows}
    return [
        name
        for name, module in model.named_modules()
        if name not in known
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and any(fnmatchcase(name, p) for p in config.exclude)
    ]
