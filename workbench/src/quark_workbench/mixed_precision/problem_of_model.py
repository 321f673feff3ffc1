"""The problem that a model poses: which of its layers are chosen for, in which groups, and how many bytes each choice takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from quark.base.names import folded
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.plan.family import architecture_of
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.rules import first_match
from quark.runs.source import BlockSource
from quark_workbench.mixed_precision.budget import Budget
from quark_workbench.mixed_precision.candidates import Candidate
from quark_workbench.mixed_precision.layer_groups import layer_groups
from quark_workbench.mixed_precision.problem import SelectionProblem

__all__ = ["problem_of"]


def problem_of(
    model: nn.Module,
    source: BlockSource,
    rows: Sequence[PlanRow],
    base: QConfig,
    fixed: Sequence[str],
    candidates: Mapping[str, Candidate],
    budget: Budget,
) -> SelectionProblem:
    """Return the problem without its data."""
    free = [row for row in rows if _is_free(row, base, fixed)]
    if not free:
        raise ConfigError("there is no layer to choose a scheme for: every linear layer is excluded, or has a scheme of its own")
    architecture = architecture_of(model)
    groups = layer_groups(free, architecture)
    dtypes: dict[str, torch.dtype] = {row.name: _weight(model, row).dtype for row in free}
    sizes: dict[str, dict[str, int]] = {}
    for group in groups:
        fitting = [c for c in candidates.values() if all(c.shape_error(shape) is None for shape in group.shapes.values())]
        if not fitting:
            error = next(iter(candidates.values())).shape_error(next(iter(group.shapes.values())))
            raise ConfigError(f"no candidate fits '{group.name}' ({error}): add one that does, or float, or exclude {folded(group.layers)}")
        sizes[group.name] = {c.name: sum(c.stored_bytes(shape, dtypes[layer]) for layer, shape in group.shapes.items()) for c in fitting}
    other = _other_bytes(model, rows, free, base)
    return SelectionProblem(model, source, architecture, groups, candidates, sizes, other, budget)


def _is_free(row: PlanRow, base: QConfig, fixed: Sequence[str]) -> bool:
    """Return whether a selection chooses for the layer: a linear one with the weights of the global scheme."""
    has_global = row.has_quantized_matrix and row.quantized_to.weight == base.global_quant_config.weight
    return has_global and first_match(row.name, fixed) is None


def _other_bytes(model: nn.Module, rows: Sequence[PlanRow], free: Sequence[PlanRow], base: QConfig) -> int:
    """Return the bytes of all tensors but the weights that are chosen for; those of fixed layers as they will be stored."""
    replaced = {id(_weight(model, row)): 0 for row in free}
    for row in rows:
        if row.has_quantized_matrix and id(_weight(model, row)) not in replaced:
            weight = _weight(model, row)
            replaced[id(weight)] = Candidate("fixed", row.quantized_to).stored_bytes(row.shape, weight.dtype)
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}
    return sum(replaced.get(key, prod(t.shape) * t.dtype.itemsize) for key, t in tensors.items())


def _weight(model: nn.Module, row: PlanRow) -> Tensor:
    weight: Any = model.get_submodule(row.name).weight
    return weight
