"""The function `select_schemes`, which chooses a scheme for each layer under a budget."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.base.names import folded, without_numbers
from quark.base.torch_state import own_torch_state
from quark.calibration.batches import calls
from quark.calibration.transform_validation import BlockSource
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.templates.schemes import scheme_record
from quark.errors import ConfigError
from quark.models.plan.family import architecture_of, template_of
from quark.models.plan.mixtures import separate_experts
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan, plan_rows
from quark.models.plan.rules import first_match, layer_config_for
from quark.plugins import layer_types
from quark.plugins.attribution import attributed
from quark.plugins.run_events import running
from quark.runs.from_disk import opened_checkpoint
from quark.runs.run import Data
from quark.runs.source import CheckpointSource, InMemorySource
from quark_workbench.mixed_precision.candidates import Candidate, candidates_of
from quark_workbench.mixed_precision.problem import Budget, SelectionProblem, layer_groups
from quark_workbench.mixed_precision.selection import SchemeSelector, SelectionResult, checked_selection, selector_of

__all__ = ["base_scheme", "configuration", "problem_of", "select_schemes"]

_WANTED_BY = "a selection of schemes"


def base_scheme(names: Sequence[str]) -> str:
    """Return the name of the candidate from which a selection takes its settings for the whole model.

    This is the first candidate with global scales that fused layers share, or else the first candidate that
    quantizes.

    Raises:
        ConfigError, UnknownNameError: `candidates_of` raises this error.
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
    """Choose a scheme for each group of layers. Return the choice and the resulting configuration.

    The selection covers the linear layers to which ``base`` gives its global scheme. Layers that runtimes
    fuse get the same scheme. No weight changes.

    Args:
        model: A float model in memory, whose fused experts become separate layers. Or the directory of a
            checkpoint, which is read block by block if the selector allows it.
        candidates: Names of schemes. ``float`` or ``bf16`` keeps a layer in float.
        budget: The budget.
        data: Calibration data, as in `quark.runs.quantize_checkpoint`.
        base: Configuration with all other settings, such as excluded layers, KV cache and algorithms. None
            takes the configuration from the template of the model family.
        fixed: Patterns of ``base.layer_quant_config`` whose layers keep their scheme.
        selector: Name of a registered selector, or a selector object. None takes the only installed selector.
        selector_options: Options of the selector, if ``selector`` is a name or None.
        runtime: Name of a program that must be able to load all candidates, such as ``"vLLM"``.
        device: Torch device to which a checkpoint is loaded. A model in memory stays on its device.
        dtype: Dtype in which a checkpoint is loaded.

    Raises:
        ConfigError: The candidates, the budget or the configuration do not fit the model.
        CalibrationError: Data are missing or unreadable.
        UnknownNameError: There is no such scheme or selector.
        PluginError: The selector raised an error, or returned an invalid result.

    Example:
        >>> from quark_workbench.mixed_precision import Budget, select_schemes
        >>> result = select_schemes("Llama-3-8B", ["fp8", "mxfp4"], Budget(bits=5), batches)  # doctest: +SKIP
        >>> result.bits, result.config.layer_quant_config  # doctest: +SKIP
    """
    with own_torch_state(), running("select", source=type(model).__name__ if isinstance(model, nn.Module) else str(model)) as events:
        events.phase("plan")
        offered = candidates_of(candidates, runtime)
        name, chooser = selector_of(selector, selector_options) if selector is None or isinstance(selector, str) else (None, selector)
        whole, source = _opened(model, device, dtype)
        base = template_of(whole).get_config(scheme=base_scheme(candidates)) if base is None else base
        rows = _planned(whole, source, base)
        problem = problem_of(whole, source, rows, base, fixed, offered, budget)
        problem.refuse_unreachable()
        events.phase("data")
        read = data(_WANTED_BY) if callable(data) and not isinstance(data, Iterable) else data
        problem = attrs.evolve(problem, data=calls(read, wanted_by=_WANTED_BY, model=whole), events=events)
        events.phase("select")
        started = time.perf_counter()
        whose = f"the selector '{name}'" if name else f"the selector {type(chooser).__name__}"
        with attributed(f"choosing schemes by {whose}"):
            selection = checked_selection(problem, chooser.select(problem), whose)
        chosen = {layer: offered[selection.choices[group.name]] for group in problem.groups for layer in group.layers}
        config = configuration(base, rows, chosen)
        return SelectionResult(config, selection, problem, name, time.perf_counter() - started)


def _planned(model: nn.Module, source: BlockSource, base: QConfig) -> tuple[PlanRow, ...]:
    """Return the rows of the plan: what each layer gets under ``base``.

    Before this, quantized experts become separate layers. The plan is passed to a source that reads a
    checkpoint.
    """
    separate_experts(model, base)
    architecture = architecture_of(model)
    rows = plan_rows(model, base, architecture)
    if isinstance(source, CheckpointSource):
        source.prepare(QuantPlan(rows, base, architecture))
    return rows


def _opened(model: nn.Module | str | Path, device: str, dtype: str) -> tuple[nn.Module, BlockSource]:
    """Return a model and the object that loads its tensors. A checkpoint's model is on the meta device."""
    if isinstance(model, nn.Module):
        return model, InMemorySource()
    _, source = opened_checkpoint(Path(model), device, dtype)
    return source.model, source


def problem_of(
    model: nn.Module,
    source: BlockSource,
    rows: Sequence[PlanRow],
    base: QConfig,
    fixed: Sequence[str],
    candidates: Mapping[str, Candidate],
    budget: Budget,
) -> SelectionProblem:
    """Return the selection problem, to which calibration data can be added."""
    free = [row for row in rows if _is_free(row, base, fixed)]
    if not free:
        raise ConfigError(
            "no layer is left to choose a scheme for: every linear layer is excluded or has its own scheme. Remove some of these rules"
        )
    architecture = architecture_of(model)
    groups = layer_groups(free, architecture)
    dtypes: dict[str, torch.dtype] = {row.name: _weight(model, row).dtype for row in free}
    sizes: dict[str, dict[str, int]] = {}
    for group in groups:
        fitting = [c for c in candidates.values() if all(c.shape_error(shape) is None for shape in group.shapes.values())]
        if not fitting:
            error = next(iter(candidates.values())).shape_error(next(iter(group.shapes.values())))
            raise ConfigError(
                f"no candidate fits '{group.name}' ({error}): add a candidate that fits, such as bf16, or exclude {folded(group.layers)}"
            )
        sizes[group.name] = {c.name: sum(c.stored_bytes(shape, dtypes[layer]) for layer, shape in group.shapes.items()) for c in fitting}
    other = _other_bytes(model, rows, free, base)
    return SelectionProblem(model, source, architecture, groups, candidates, sizes, other, budget)


def _is_free(row: PlanRow, base: QConfig, fixed: Sequence[str]) -> bool:
    """Return whether a selection covers a layer.

    It covers linear layers whose weights have the global scheme of ``base``, except those that a pattern in
    ``fixed`` matches.
    """
    has_global = row.has_quantized_matrix and row.quantized_to.weight == base.global_quant_config.weight
    return has_global and first_match(row.name, fixed) is None


def _other_bytes(model: nn.Module, rows: Sequence[PlanRow], free: Sequence[PlanRow], base: QConfig) -> int:
    """Return the bytes of all tensors of the result except the weights of the layers in ``free``."""
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


def configuration(base: QConfig, rows: Sequence[PlanRow], chosen: Mapping[str, Candidate]) -> QConfig:
    """Return ``base`` with new weight and input quantization for the chosen layers.

    The quantization of layer outputs does not change. An example is outputs that enter a quantized KV cache.

    Args:
        base: The configuration of all other layers.
        rows: Rows of the plan under ``base``, for all layers.
        chosen: Dictionary from full name of layer to candidate.
    """
    weights: Counter[str] = Counter()
    for row in rows:
        if row.name in chosen and not chosen[row.name].is_float:
            weights[chosen[row.name].name] += prod(row.shape)
    most = next((name for name, _ in weights.most_common(1)), None)
    main = next((c for c in chosen.values() if c.name == most), None)
    wanted = {row.name: _layer(row, chosen[row.name]) for row in rows if row.name in chosen}
    config = attrs.evolve(
        base,
        global_quant_config=base.global_quant_config if main is None else main.config.copied(),
        scheme=base.scheme if main is None else main.name,
    )
    wrong = {row.name: wanted[row.name] for row in rows if row.name in wanted and _resolved(config, row) != wanted[row.name]}
    names = [row.name for row in rows]
    floats = {name: layer for name, layer in wrong.items() if layer == QLayerConfig()}
    others = {name: layer for name, layer in wrong.items() if name not in floats}
    own = _patterns(others, names)  # match chosen layers alone, and go before all patterns of ``base``
    by_layer = {**own, **base.layer_quant_config, **own}
    return attrs.evolve(config, exclude=[*config.exclude, *_patterns(floats, names)], layer_quant_config=by_layer)


def _layer(row: PlanRow, candidate: Candidate) -> QLayerConfig:
    """Return the settings of a layer: weight and input as in the candidate, and output as in ``row``."""
    output = None if row.config is None else row.config.output_tensors
    own = candidate.config.copied()
    return own if output is None else attrs.evolve(own, output_tensors=output)


def _resolved(config: QConfig, row: PlanRow) -> QLayerConfig:
    return layer_config_for(config, row.name, layer_types().load_layer(row.layer_type)).config or QLayerConfig()


def _patterns(layers: Mapping[str, QLayerConfig], names: Sequence[str]) -> dict[str, QLayerConfig]:
    """Return a dictionary from pattern or full name to settings, which has the same effect as ``layers``.

    A pattern stands for several layers if all layers in ``names`` that match it have equal settings.
    """
    patterns: dict[str, QLayerConfig] = {}
    done: set[str] = set()
    for name, layer in layers.items():
        if name in done:
            continue
        pattern, same = without_numbers(name), [n for n, other in layers.items() if other == layer]
        matched = [n for n in names if fnmatchcase(n, pattern)]
        if len(matched) > 1 and set(matched) <= set(same):
            patterns[pattern] = layer.copied()
            done |= set(matched)
        else:
            patterns[name] = layer.copied()
    return patterns
