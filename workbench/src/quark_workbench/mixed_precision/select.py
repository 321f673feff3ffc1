"""select_schemes: choose a scheme for each layer of a model under a budget, and return the configuration that says so."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from quark.calibration.batches import calls
from quark.config.model import QConfig
from quark.config.templates.schemes import scheme_record
from quark.models.hf.loading import torch_device
from quark.models.hf.shards import check_shards
from quark.models.hf.skeleton import skeleton
from quark.models.hf.stored_tensors import StoredTensors
from quark.models.plan.family import architecture_of, template_of, weight_converters_of
from quark.models.plan.mixtures import separate_experts
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan, plan_rows
from quark.plugins.attribution import attributed
from quark.plugins.run_events import running
from quark.runs.run import Data
from quark.runs.source import BlockSource, CheckpointSource, InMemorySource
from quark_workbench.mixed_precision.budget import Budget
from quark_workbench.mixed_precision.candidates import Candidate, candidates_of
from quark_workbench.mixed_precision.configuration import configuration
from quark_workbench.mixed_precision.problem import SelectionProblem
from quark_workbench.mixed_precision.problem_of_model import problem_of
from quark_workbench.mixed_precision.selection import Selection, SelectionResult
from quark_workbench.mixed_precision.selector import SchemeSelector, checked_selection, selector_of

__all__ = ["base_scheme", "select_schemes"]

_WANTED_BY = "a selection of schemes"


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

    Chosen for are the linear layers that ``base`` gives its global scheme. Layers that runtimes fuse get one
    scheme.

    Args:
        model: A float model in memory, whose fused experts become separate layers; or the directory of a
            checkpoint, of which one block at a time is read where the selector does with that.
        candidates: Names of schemes; ``float`` or ``bf16`` leaves a layer as it is.
        budget: What may be spent.
        data: Calibration data, as of `quark.runs.quantize_checkpoint`.
        base: Everything else of the configuration: excluded layers, cache, algorithms; None for what the
            template of the family says.
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
        >>> from quark_workbench.mixed_precision import Budget, select_schemes
        >>> result = select_schemes("Llama-3-8B", ["fp8", "mxfp4"], Budget(bits=5), batches)   # doctest: +SKIP
        >>> result.bits, result.config.layer_quant_config                                     # doctest: +SKIP
    """
    with running("select", source=type(model).__name__ if isinstance(model, nn.Module) else str(model)) as events:
        events.phase("plan")
        offered = candidates_of(candidates, runtime)
        name, chooser = selector_of(selector, selector_options) if selector is None or isinstance(selector, str) else (None, selector)
        whole, source = (model, InMemorySource()) if isinstance(model, nn.Module) else _checkpoint(Path(model), device, dtype)
        base = template_of(whole).get_config(scheme=base_scheme(candidates)) if base is None else base
        rows = _planned(whole, source, base)
        problem = problem_of(whole, source, rows, base, fixed, offered, budget)
        problem.refuse_unreachable()
        events.phase("data")
        read = data(_WANTED_BY) if callable(data) and not isinstance(data, Iterable) else data
        problem = attrs.evolve(problem, data=calls(read, wanted_by=_WANTED_BY, model=whole), events=events)
        events.phase("select")
        started = time.perf_counter()
        selection = _selected(problem, chooser, name)
        config = configuration(base, rows, _by_layer(problem, selection), fixed)
        return SelectionResult(config, selection, problem, name, time.perf_counter() - started)


def _by_layer(problem: SelectionProblem, selection: Selection) -> dict[str, Candidate]:
    """Return the candidate of each layer."""
    return {layer: problem.candidates[selection.choices[group.name]] for group in problem.groups for layer in group.layers}


def _selected(problem: SelectionProblem, chooser: SchemeSelector, name: str | None) -> Selection:
    """Return what the selector chooses, checked."""
    whose = f"the selector '{name}'" if name else f"the selector {type(chooser).__name__}"
    with attributed(f"choosing schemes by {whose}"):
        return checked_selection(problem, chooser.select(problem), whose)


def _planned(model: nn.Module, source: BlockSource, base: QConfig) -> tuple[PlanRow, ...]:
    """Return what every layer gets under ``base``; experts that it quantizes are separate layers then, and the source knows the blocks."""
    separate_experts(model, base)
    architecture = architecture_of(model)
    rows = plan_rows(model, base, architecture)
    if isinstance(source, CheckpointSource):
        source.prepare(QuantPlan(rows, base, architecture))
    return rows


def _checkpoint(path: Path, device: str, dtype: str) -> tuple[nn.Module, BlockSource]:
    shards, target = check_shards(path), torch_device(device)
    model = skeleton(path, dtype, target)
    return model, CheckpointSource(model, StoredTensors(model, shards, path, weight_converters_of(model)), target)
