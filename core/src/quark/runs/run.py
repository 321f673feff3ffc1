"""Run: plan, algorithms, data and memory mode, decided together before any weight is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import nn

from quark.algorithms import Rounding
from quark.base.log import get_logger
from quark.base.names import folded
from quark.base.ranks import ALONE, Ranks
from quark.calibration.batches import Call, calls
from quark.calibration.sample_grid import SampleGrid
from quark.calibration.transform_validation import TransformValidation
from quark.config.model import QConfig
from quark.errors import ConfigError, UnsupportedError
from quark.models.hf.attention_switch import refuse_unswitchable
from quark.models.plan.decoder_blocks import decoder_blocks, owners
from quark.models.plan.family import architecture_of
from quark.models.plan.mixtures import separate_experts
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.plan_text import plan_lines, warning_lines
from quark.models.plan.quant_plan import CodesOf, QuantPlan, has_static_scale, make_plan
from quark.plugins.attribution import attributed
from quark.plugins.events import RunPlanned
from quark.plugins.run_events import SILENT, RunEvents
from quark.runs.memory import SHARE, free_bytes, held_bytes, held_probabilities, tokens_in
from quark.runs.selected_algorithms import Algorithms, algorithms_of, own_settings, refuse_excluded_schemes, refuse_vectors, registered_name
from quark.runs.source import carried_by

Data = Iterable[Any] | Callable[[str], Iterable[Any] | None] | None
"""Calibration data (see `quark.calibration.batches.calls`), or a function that returns them.

If a run needs no data, the function is not called. Its argument says what needs data, such as ``"gptq"``.
"""

TWO_PASSES = (
    "activations of all calibration samples would take more memory than allowed (activation_memory): each block runs twice, and its "
    "layers are calibrated on the outputs of float weights"
)


@attrs.frozen(eq=False)
class Run:
    """The plan, algorithms, data and memory mode of the quantization of one model.

    Its states, and the functions between them::

        Run         plan and algorithms: `plan_run` makes it from a configuration
         │ with_data
        Run         also has data and a memory mode
         │ start_run
        StartedRun  transforms are validated and applied outside the blocks; blocks follow one by one
         │ quantize_blocks, finish_run
        FinishedRun the quantized model, or its checkpoint, and the report

    Nothing in the model is changed before the run is started. The other two classes are in
    `quark.runs.started_run`.

    Attributes:
        plan: The plan of this model, or of one of the same structure.
        algorithms: Transforms, rounding and tunings of the run.
        data: Calibration calls of all ranks; empty if nothing needs data.
        two_passes: Whether each block runs twice, to save memory.
        ranks: The processes that share the run. Each has the same model, configuration and data.
        events: Tells listeners what the run does.
    """

    plan: QuantPlan
    algorithms: Algorithms
    data: Sequence[Call] = ()
    two_passes: bool = False
    ranks: Ranks = ALONE
    events: RunEvents = SILENT

    @property
    def needs_data(self) -> str:
        """A description of all that needs calibration data, for messages; empty if nothing does."""
        static = ["activations with static scales"] if self.plan.calibrated else []
        return " and ".join([*static, *(f"the algorithm '{name}'" for name in self.algorithms.in_need_of_data)])

    def chosen(self, rows: Iterable[PlanRow]) -> set[str]:
        """Return the full names of the layers whose codes the rounding chooses, according to the plan.

        Round-to-nearest chooses the codes of all layers.
        """
        is_nearest = self.algorithms.rounding_name is None
        return {r.name for r in rows if (r.has_codes_to_choose if is_nearest else r.algorithm is not None)}

    @attributed("planning the run")
    def with_data(self, model: nn.Module, data: Data, device: torch.device, ranks: Ranks = ALONE, events: RunEvents = SILENT) -> Run:
        """Return the run with its data and its memory mode, and log its plan. Nothing is changed.

        Args:
            model: The model of the plan; meta tensors suffice.
            data: Calibration data, read if something needs them.
            device: Device of the forward passes.
            ranks: The processes that share the run.
            events: Tells listeners what the run does.

        Raises:
            CalibrationError: Data are needed, but there are none.
            UnsupportedError: Attention is to be quantized, but the model's attention cannot be replaced.
        """
        if self.plan.attentions:
            refuse_unswitchable(model, [a.name for a in self.plan.attentions])
        if ranks.size > 1 and self.algorithms.tunings:
            raise UnsupportedError(
                f"'{next(iter(self.algorithms.tunings))}' tunes each block on all calibration samples, but {ranks.size} processes "
                "divide them: run one process, or leave the algorithm out"
            )
        batches = self._read(data, model, events)
        # In a deterministic run, the memory mode does not depend on the number of ranks.
        held = batches if ranks.is_deterministic else batches[SampleGrid(len(batches), ranks).own]
        run = self.in_memory_mode(ranks.any(needs_two_passes(model, self.plan, self.algorithms, held, device)))
        run = attrs.evolve(run, data=batches, ranks=ranks, events=events)
        run._tell(model)
        return run

    def _read(self, data: Data, model: nn.Module, events: RunEvents) -> Sequence[Call]:
        """Return the calls that calibration data give; none if nothing needs data."""
        if callable(data) and not isinstance(data, Iterable):
            if self.needs_data:
                events.phase("data")
            data = data(self.needs_data) if self.needs_data else None
        is_validated = any(t.is_validated for t in self.algorithms.transforms.values())
        is_read = self.needs_data or (is_validated and data is not None)
        return calls(data, wanted_by=self.needs_data, model=model) if is_read else []

    def _tell(self, model: nn.Module) -> None:
        """Log the plan, and tell listeners the size of the run."""
        warned = warning_lines(self.plan)
        for line in plan_lines(self.plan):
            (get_logger().warning if line in warned else get_logger().info)(line)
        sizes = {"blocks": len(decoder_blocks(model, self.plan.architecture)), "layers": len(self.plan.quantized)}
        sizes |= {"samples": len(self.data), "tokens": tokens_in(self.data), "processes": self.ranks.size}
        self.events.tell(RunPlanned, **sizes, two_passes=self.two_passes)

    def for_data(self, model: nn.Module, data: Sequence[Call], device: torch.device) -> Run:
        """Return the run, without data, in the memory mode that these calls need on a device.

        `with_data` decides the mode again.
        """
        return self.in_memory_mode(True) if needs_two_passes(model, self.plan, self.algorithms, data, device) else self

    def in_memory_mode(self, two_passes: bool) -> Run:
        """Return the run with that memory mode, whatever memory is free now."""
        notes = tuple(note for note in self.plan.notes if note != TWO_PASSES)
        plan = attrs.evolve(self.plan, notes=(*notes, TWO_PASSES) if two_passes else notes)
        return attrs.evolve(self, plan=plan, two_passes=two_passes)

    def as_validated(self, model: nn.Module, validations: Mapping[str, TransformValidation]) -> Run:
        """Return the run without refused transforms and refused parts of transforms."""
        left_out = [name for name, validation in validations.items() if not validation.is_accepted]
        parts = {name: v.settings for name, v in validations.items() if v.is_accepted and v.settings is not None}
        if not left_out and not parts:
            return self
        named = {registered_name(settings): settings for settings in self.plan.config.algo_config or []}
        settings = [parts.get(name, own) for name, own in named.items() if name not in left_out]
        run = plan_run(model, attrs.evolve(self.plan.config, algo_config=settings or None))
        notes = [*([TWO_PASSES] if self.two_passes else []), *(f"skipped, no gain on held-out tokens: {name}" for name in left_out)]
        notes += [f"only a part of {name} is applied (no gain from the rest): {validations[name].chosen}" for name in parts]
        plan = attrs.evolve(run.plan, notes=(*run.plan.notes, *notes))
        return attrs.evolve(run, plan=plan, data=self.data, two_passes=self.two_passes, ranks=self.ranks, events=self.events)

    def without_idle(self, names: Sequence[str]) -> QuantPlan:
        """Return the plan without the transforms in ``names``, which have changed no block; warn of each.

        A transform that also rounds stays in the plan.
        """
        plan = self.plan
        for name in names:
            is_rounding = name == self.algorithms.rounding_name
            effect = "only its rounding is in the result" if is_rounding else "the result does not name it"
            get_logger().warning(f"The algorithm '{name}' has changed no block, so {effect}; model.quark_report.transformed says why.")
            if not is_rounding:
                settings = [a for a in plan.config.algo_config or [] if registered_name(a) != name]
                notes = (*(n for n in plan.notes if n != _note(name)), f"left out, since it has changed no block: {name}")
                plan = attrs.evolve(plan, config=attrs.evolve(plan.config, algo_config=settings or None), notes=notes)
        return plan


@attributed("planning the run")
def plan_run(model: nn.Module, config: QConfig, codes_of: CodesOf = MappingProxyType({}), carried: Sequence[str] | None = None) -> Run:
    """Plan a run: return the `Run` of a configuration on ``model``, with its algorithms.

    `Run.with_data` adds data and memory mode.

    The model is not changed, except that fused experts that are to be quantized become separate layers. The
    plan has a copy of ``config``: later changes of ``config`` have no effect on the run.

    Args:
        model: The model; meta tensors suffice.
        config: The quantization configuration.
        codes_of: Layers that are quantized in the source. Layers that are not to be quantized keep this
            quantization, unless the configuration says otherwise.
        carried: Names of the checkpoint's tensors that the model class does not use. None looks in the
            checkpoint from which the model was loaded.

    Raises:
        ConfigError: The configuration does not fit the model.
        UnsupportedError: An algorithm cannot run.
    """
    config = _own_config(config)
    codes_of = codes_of if config.keep_prequantized_layers else {}
    algorithms = algorithms_of(config)
    separate_experts(model, config, {name for name, codes in codes_of.items() if codes is not None})
    carried = carried_by(model) if carried is None else carried
    plan = make_plan(model, config, architecture_of(model), codes_of).carrying(carried, model)
    _refuse_transforms(list(algorithms.transforms), plan, model)
    if algorithms.branching is not None and plan.kept:
        raise ConfigError(
            f"'{algorithms.branching.name}' puts branches beside layers that the run rounds, but {len(plan.kept)} layer(s) keep the "
            f"quantization of the source: {folded(plan.kept)}. Set keep_prequantized_layers=False (--no-keep-prequantized), or leave it out"
        )
    if algorithms.branching is not None:
        plan = plan.with_own_codes(plan.sharing({row.name for row in plan.rows}))
    plan, algorithms = _resolved(model, attrs.evolve(plan, notes=(*plan.notes, *_notes(algorithms, plan))), algorithms)
    if algorithms.rounding_name is not None:
        plan = _with_rounding(plan, algorithms, {b.name for b in decoder_blocks(model, plan.architecture)})
    refuse_vectors(algorithms, plan.rows)
    return Run(plan, algorithms)


def _own_config(config: QConfig) -> QConfig:
    """Return a copy of a configuration, with each algorithm's settings in the algorithm's own class.

    Raise ConfigError if the configuration cannot be run on any model.
    """
    config = config.copied()
    directory = config.spill_directory
    if directory is not None and not Path(directory).is_dir():
        raise ConfigError(f"spill_directory='{directory}' is not a directory: make it, or give one on a disk with room for activations")
    if config.algo_config is not None:
        config.algo_config = [own_settings(settings) for settings in config.algo_config]
    return config


def _refuse_transforms(names: Sequence[str], plan: QuantPlan, model: nn.Module) -> None:
    """Raise ConfigError if transforms of these names cannot change the model of a plan."""
    if names and plan.kept:
        raise ConfigError(
            f"'{names[0]}' changes weights, and {len(plan.kept)} layer(s) keep the quantization of the source: {folded(plan.kept)}. "
            f"Set keep_prequantized_layers=False (--no-keep-prequantized), so that they become float, or leave '{names[0]}' out"
        )
    if names and plan.architecture is None:
        raise ConfigError(
            f"'{names[0]}' needs facts about the model's family, but this {type(model).__name__} has no template: "
            "register a template for it, or leave the algorithm out"
        )


def _notes(algorithms: Algorithms, plan: QuantPlan) -> list[str]:
    """Return notes for a plan about its transforms, tunings and branches."""
    notes = [_note(name) for name in algorithms.transforms]
    notes += [
        f"after rounding, each block is tuned by {name}, so that its output is closer to the float block's" for name in algorithms.tunings
    ]
    if notes and plan.architecture is not None and not plan.architecture.block_lists:
        notes.append(f"the blocks of '{plan.architecture.model_type}' are not known: the whole model is changed as one block")
    if algorithms.branching is not None:
        notes.append(f"{algorithms.branching.name} puts branches beside layers; their tensors are made when a layer is rounded")
    return notes


def _with_rounding(plan: QuantPlan, algorithms: Algorithms, blocks: Collection[str]) -> QuantPlan:
    """Return the plan in which layers of ``blocks`` are assigned to the rounding.

    Raises:
        ConfigError: The rounding gets no layer.
        UnsupportedError: The rounding cannot round the scheme of a layer.
    """
    assert algorithms.rounding_name is not None
    named = {r.name for r in plan.quantized if _is_named_by(algorithms.rounding, r, blocks)}
    rows = with_algorithm(plan, algorithms, blocks)
    others = _by_type([r for r in rows if r.name in named and not r.is_linear])
    if not any(r.name in named and r.is_linear for r in rows):
        inside = next((r.name.removeprefix(f"{block}.") for r in plan.quantized if (block := _block_of(r, blocks)) is not None), None)
        of_types = f" (it rounds linear layers, and here are {others})" if others else ""
        raise ConfigError(
            f"the algorithm '{algorithms.rounding_name}' matches no layer of this model{of_types}: the names in its configuration are "
            f"relative to a block, such as '{inside or '(none)'}' here. Give settings of your own (inside_layer_modules), or "
            "a template that names the family's projections (--template-file)"
        )
    refuse_excluded_schemes(algorithms.rounding_name, rows)
    by_type = [f"'{algorithms.rounding_name}' rounds linear layers; {others} are rounded to nearest"] if others else []
    warnings = (*plan.warnings, *_unmatched(algorithms, rows, blocks))
    return attrs.evolve(plan, rows=rows, notes=(*plan.notes, *by_type), warnings=warnings)


def with_algorithm(plan: QuantPlan, algorithms: Algorithms, blocks: Collection[str]) -> tuple[PlanRow, ...]:
    """Return the rows of a plan with the name of the rounding that chooses their codes.

    Only layers in ``blocks`` get the name. A run rounds each layer as its row says.
    """
    name, rounding = algorithms.rounding_name, algorithms.rounding
    return tuple(attrs.evolve(r, algorithm=name) if r.has_codes_to_choose and _is_named_by(rounding, r, blocks) else r for r in plan.rows)


def _is_named_by(rounding: Rounding, row: PlanRow, blocks: Collection[str]) -> bool:
    """Return whether the rounding would choose the codes of a layer if the layer is linear."""
    block = _block_of(row, blocks) if row.has_quantized_weight and not row.is_kept else None
    return block is not None and rounding.applies_to(row.name.removeprefix(f"{block}."))


def _block_of(row: PlanRow, blocks: Collection[str]) -> str | None:
    """Return the full name of the decoder block that a layer lies in."""
    return next((name for name in owners(row.name) if name in blocks), None)


def _by_type(rows: Iterable[PlanRow]) -> str:
    """Return layers by type, for messages; empty if there are none."""
    names_of: dict[str, list[str]] = {}
    for row in rows:
        names_of.setdefault(row.layer_type, []).append(row.name)
    return ", ".join(f"{len(names)} {layer_type} layer(s) ({folded(names)})" for layer_type, names in names_of.items())


def _note(name: str) -> str:
    """Return a plan's note about a transform."""
    return f"before rounding, each block is transformed by {name} (its output is unchanged)"


def _resolved(model: nn.Module, plan: QuantPlan, algorithms: Algorithms) -> tuple[QuantPlan, Algorithms]:
    """Return the plan with the transforms' settings for this model, and transforms with these settings."""
    for name, transform in algorithms.transforms.items():
        if (resolved := transform.resolve_for_model(model, plan)) is not None:
            settings = [resolved.settings if a.name == name else a for a in plan.config.algo_config or []]
            plan = attrs.evolve(plan, config=attrs.evolve(plan.config, algo_config=settings), notes=(*plan.notes, *resolved.notes))
            algorithms = algorithms.with_settings(resolved.settings)
    return plan, algorithms


def _unmatched(algorithms: Algorithms, rows: Sequence[PlanRow], blocks: Collection[str]) -> Iterator[str]:
    """Yield a warning if the rounding's settings name layers that no decoder block has."""
    names = [r.name.removeprefix(f"{block}.") for r in rows if (block := _block_of(r, blocks)) is not None]
    if unmatched := algorithms.rounding.unmatched(names):
        left = sum(1 for r in rows if r.has_quantized_weight and not r.is_kept and not r.algorithm)
        yield (
            f"'{algorithms.rounding_name}' names layers that no decoder block has: {', '.join(unmatched)}. {left} quantized layers are "
            f"rounded to nearest; a layer here is '{names[-1] if names else '(none)'}'"
        )


def needs_two_passes(model: nn.Module, plan: QuantPlan, algorithms: Algorithms, data: Sequence[Call], device: torch.device) -> bool:
    """Return whether forward passes that wait inside a block would hold more memory than allowed."""
    held = held_by_forwards(model, plan, algorithms, data)
    allowed = allowed_activations(plan.config, device)
    return allowed is not None and held > allowed


def held_by_forwards(model: nn.Module, plan: QuantPlan, algorithms: Algorithms, data: Sequence[Call]) -> int:
    """Return an estimate of the bytes that forward passes hold while they wait inside a block.

    0 if no forward pass waits inside a block.
    """
    if not algorithms.is_sequential:
        return 0
    held = held_bytes(model, plan, tokens_in(data), algorithms.streams)
    if any(has_static_scale(a.probabilities) for a in plan.attentions):
        held += held_probabilities(model, data)
    return held


def allowed_activations(config: QConfig, device: torch.device) -> int | None:
    """Return the bytes that activations may take.

    None if there is no limit and free memory is not known.
    """
    if config.activation_memory is not None:
        return config.activation_memory
    free = free_bytes(device)
    return None if free is None else int(SHARE * free)
