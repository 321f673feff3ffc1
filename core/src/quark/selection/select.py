"""select_schemes: choose a scheme for each layer of a model under a budget, and return the configuration that says so."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from quark.calibration.batches import calls
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.hf.dtype_and_device import torch_device
from quark.hf.shards import check_shards
from quark.hf.skeleton import skeleton
from quark.hf.stored_tensors import StoredTensors
from quark.names import folded
from quark.planning.family import architecture_of, template_of, weight_converters_of
from quark.planning.mixtures import separate_experts
from quark.planning.plan import QuantPlan, plan_rows
from quark.planning.plan_row import PlanRow
from quark.planning.precedence import first_match
from quark.plugins.attribution import attributed
from quark.runs.run import Data
from quark.runs.source import BlockSource, CheckpointSource, InMemorySource
from quark.selection.budget import Budget
from quark.selection.candidates import Candidate, candidates_of
from quark.selection.configuration import configuration
from quark.selection.layer_groups import layer_groups
from quark.selection.problem import SelectionProblem
from quark.selection.selection import SelectionResult
from quark.selection.selector import SchemeSelector, checked_selection, selector_of
from quark.templates.schemes import scheme_record

__all__ = ["base_scheme", "select_schemes"]


def base_scheme(names: Sequence[str]) -> str:
    """Return the candidate whose settings of the whole model a selection starts from: one that shares global scales, else the first.

    Raises:
        ConfigError, UnknownNameError: As `candidates_of`.
    """
    quantized = [name for name, candidate in candidates_of(names).items() if not candidate.is_float]
    return next((name for name in quantized if scheme_record(name).shares_global_scale), quantized[0])


def select_schemes(
    model: nn.Module | str | Path,
    candidates: Sequence[str],
    budget: Budget,
    data: Data = None,
    *,
    base: QConfig | None = None,
    fixed: Sequence[str] = (),
    selector: str | SchemeSelector | None = None,
    selector_options: Mapping[str, Any] | None = None,
    runtime: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
) -> SelectionResult:
    """Return a choice of one scheme for each group of layers, and the configuration that follows; no weight is changed.

    Chosen for are the linear layers that ``base`` gives its global scheme. Layers that runtimes fuse get one scheme.

    Args:
        model: A float model in memory, whose fused experts become separate layers; or the directory of a checkpoint, of which one block at
            a time is read where the selector does with that.
        candidates: Names of schemes; ``float`` or ``bf16`` leaves a layer as it is.
        budget: What may be spent.
        data: Calibration data, as of `quark.runs.quantize_checkpoint`.
        base: Everything else of the configuration: excluded layers, cache, algorithms; None for what the template of the family says.
        fixed: Patterns of ``base.layer_quant_config`` whose layers are not chosen for.
        selector: Name of a registered one, or an object; None for the one that is installed.
        selector_options: Of a selector that is given by name.
        runtime: A program that has to load all candidates, such as ``"vLLM"``.
        device: Torch device, for a checkpoint; a model in memory is worked on where it lies.
        dtype: Of the float model, for a checkpoint.

    Raises:
        ConfigError: The candidates, the budget or the configuration do not fit the model.
        CalibrationError: Data are missing or unreadable.
        UnknownNameError: There is no such scheme or selector.
        PluginError: The selector raised an error, or returned what cannot be built on.

    Example:
        >>> from quark.selection import Budget, select_schemes
        >>> result = select_schemes("Llama-3-8B", ["fp8", "mxfp4"], Budget(bits=5), batches)   # doctest: +SKIP
        >>> result.bits, result.config.layer_quant_config                                     # doctest: +SKIP
    """
    offered = candidates_of(candidates, runtime)
    name, chooser = selector_of(selector, selector_options) if selector is None or isinstance(selector, str) else (None, selector)
    source: BlockSource
    if isinstance(model, nn.Module):
        source, whole, where = InMemorySource(), model, _device_of(model)
    else:
        source = _checkpoint(Path(model), device, dtype)
        whole, where = source.model, source.device
    if base is None:
        base = template_of(whole).get_config(scheme=base_scheme(candidates))
    separate_experts(whole, base)
    rows = plan_rows(whole, base, architecture_of(whole))
    if isinstance(source, CheckpointSource):
        source.prepare(QuantPlan(rows, base, architecture_of(whole)))
    problem = _problem(whole, source, rows, base, fixed, offered, budget)
    problem.refuse_unreachable()
    if callable(data):
        data = data("a selection of schemes")
    problem = attrs.evolve(problem, data=calls(data, wanted_by="a selection of schemes", model=whole))
    started = time.perf_counter()
    whose = f"the selector '{name}'" if name else f"the selector {type(chooser).__name__}"
    with attributed(f"{whose} on {where}"):
        selection = checked_selection(problem, chooser.select(problem), whose)
    chosen = {layer: offered[selection.choices[group.name]] for group in problem.groups for layer in group.layers}
    config = configuration(base, rows, chosen, fixed)
    return SelectionResult(config, selection, problem, name, time.perf_counter() - started)


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _checkpoint(path: Path, device: str, dtype: str) -> CheckpointSource:
    shards, target = check_shards(path), torch_device(device)
    model = skeleton(path, dtype, target)
    return CheckpointSource(model, StoredTensors(model, shards, path, weight_converters_of(model)), target)


def _problem(
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
    dtypes = {row.name: model.get_submodule(row.name).weight.dtype for row in free}  # type: ignore[union-attr]
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
    has_global = row.config is not None and row.config.weight is not None and row.config.weight == base.global_quant_config.weight
    return has_global and row.is_linear and first_match(row.name, fixed) is None


def _other_bytes(model: nn.Module, rows: Sequence[PlanRow], free: Sequence[PlanRow], base: QConfig) -> int:
    """Return the bytes of all tensors but the weights that are chosen for; those of fixed layers as they will be stored."""
    replaced = {id(model.get_submodule(row.name).weight): 0 for row in free}
    for row in rows:
        if row.config is not None and row.config.weight is not None and row.name not in {one.name for one in free} and row.is_linear:
            weight: Any = model.get_submodule(row.name).weight
            replaced[id(weight)] = Candidate("fixed", row.config).stored_bytes(row.shape, weight.dtype)
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}
    return sum(replaced.get(key, prod(t.shape) * t.dtype.itemsize) for key, t in tensors.items())
