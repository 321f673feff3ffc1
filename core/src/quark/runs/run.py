"""Run: the plan, algorithms, data and memory mode of a run. They are decided before any weight is changed."""

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
"""Calibration data (see `quark.calibration.batches.calls`), or a function that returns calibration data.

The function is called only if the run needs data. Its argument is a text that says what needs data.
"""

TWO_PASSES = (
    "activations of all calibration samples would need more memory than allowed (activation_memory), so each block runs twice, "
    "and its layers are calibrated on the outputs of float weights"
)


@attrs.frozen(eq=False)
class Run:
    """The plan, algorithms, data and memory mode of a run that quantizes one model.

    A run goes through these states. The names between them are functions::

        Run         has a plan and algorithms: `plan_run` makes it from a configuration
         │ with_data
        Run         also has data and a memory mode
         │ start_run
        StartedRun  transforms are validated and applied outside the blocks; blocks follow one by one
         │ quantize_blocks, finish_run
        FinishedRun the quantized model, or its checkpoint, and the report

    The model is not changed before the run is started. The other two classes are in `quark.runs.started_run`.

    Attributes:
        plan: The plan of the model. It may have been made from another model with the same structure.
        algorithms: Transforms, rounding and tunings of the run.
        data: Calibration calls of all ranks. Empty if nothing needs data.
        two_passes: Whether each block is computed twice, to save memory.
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
        """A text for messages that says what needs calibration data. Empty if nothing does."""
        static = ["activations with static scales"] if self.plan.calibrated else []
        return " and ".join([*static, *(f"the algorithm '{name}'" for name in self.algorithms.in_need_of_data)])

    def chosen(self, rows: Iterable[PlanRow]) -> set[str]:
        """Return the full names of the layers in ``rows`` whose codes the rounding of the run chooses.

        If the rounding is round-to-nearest, these are all layers that do not have codes yet.
        """
        is_nearest = self.algorithms.rounding_name is None
        return {r.name for r in rows if (r.has_codes_to_choose if is_nearest else r.algorithm is not None)}

    @attributed("planning the run")
    def with_data(self, model: nn.Module, data: Data, device: torch.device, ranks: Ranks = ALONE, events: RunEvents = SILENT) -> Run:
        """Read the data, choose the memory mode and log the plan. Return the run with the data and the memory
        mode.

        Args:
            model: The model of the plan. It is not changed, and its tensors may be on the meta device.
            data: Calibration data. They are read only if something needs them.
            device: Device of the forward passes.
            ranks: The processes that share the run.
            events: Tells listeners what the run does.

        Raises:
            CalibrationError: Data are needed, but there are none.
            UnsupportedError: The plan quantizes attention, but the model's attention cannot be replaced. Or
                several processes run a tuning.
        """
        if self.plan.attentions:
            refuse_unswitchable(model, [a.name for a in self.plan.attentions])
        if ranks.size > 1 and self.algorithms.tunings:
            raise UnsupportedError(
                f"'{next(iter(self.algorithms.tunings))}' tunes each block on all calibration samples, but {ranks.size} processes "
                "divide the samples. Run one process, or leave out the algorithm"
            )
        batches = self._read(data, model, events)
        # In a deterministic run, the memory mode does not depend on the number of ranks.
        held = batches if ranks.is_deterministic else batches[SampleGrid(len(batches), ranks).own]
        run = self.in_memory_mode(ranks.any(needs_two_passes(model, self.plan, self.algorithms, held, device)))
        run = attrs.evolve(run, data=batches, ranks=ranks, events=events)
        run._tell(model)
        return run

    def _read(self, data: Data, model: nn.Module, events: RunEvents) -> Sequence[Call]:
        """Return the calibration data as calls. Return an empty list if nothing needs data."""
        if callable(data) and not isinstance(data, Iterable):
            if self.needs_data:
                events.phase("data")
            data = data(self.needs_data) if self.needs_data else None
        is_validated = any(t.is_validated for t in self.algorithms.transforms.values())
        is_read = self.needs_data or (is_validated and data is not None)
        return calls(data, wanted_by=self.needs_data, model=model) if is_read else []

    def _tell(self, model: nn.Module) -> None:
        """Log the plan, and tell listeners the number of blocks, layers, samples and tokens of the run."""
        warned = warning_lines(self.plan)
        for line in plan_lines(self.plan):
            (get_logger().warning if line in warned else get_logger().info)(line)
        sizes = {"blocks": len(decoder_blocks(model, self.plan.architecture)), "layers": len(self.plan.quantized)}
        sizes |= {"samples": len(self.data), "tokens": tokens_in(self.data), "processes": self.ranks.size}
        self.events.tell(RunPlanned, **sizes, two_passes=self.two_passes)

    def for_data(self, model: nn.Module, data: Sequence[Call], device: torch.device) -> Run:
        """Return the run with the memory mode that suits ``data``. The returned run does not have the data
        itself.

        A later call of `with_data` chooses the mode again.
        """
        return self.in_memory_mode(True) if needs_two_passes(model, self.plan, self.algorithms, data, device) else self

    def in_memory_mode(self, two_passes: bool) -> Run:
        """Return the run with the memory mode ``two_passes``. The memory that is free now does not matter."""
        notes = tuple(note for note in self.plan.notes if note != TWO_PASSES)
        plan = attrs.evolve(self.plan, notes=(*notes, TWO_PASSES) if two_passes else notes)
        return attrs.evolve(self, plan=plan, two_passes=two_passes)

    def as_validated(self, model: nn.Module, validations: Mapping[str, TransformValidation]) -> Run:
        """Return the run without everything that ``validations`` do not accept: whole transforms or parts of
        them.
        """
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
        """Return the plan without the transforms ``names``, which have changed no block. Log a warning for
        each.

        A transform that is also the rounding stays in the plan.
        """
        plan = self.plan
        for name in names:
            is_rounding = name == self.algorithms.rounding_name
            effect = "only its rounding is in the result" if is_rounding else "the result does not name it"
            get_logger().warning(f"The algorithm '{name}' has changed no block, so {effect}. model.quark_report.transformed says why.")
            if not is_rounding:
                settings = [a for a in plan.config.algo_config or [] if registered_name(a) != name]
                notes = (*(n for n in plan.notes if n != _note(name)), f"left out, since it has changed no block: {name}")
                plan = attrs.evolve(plan, config=attrs.evolve(plan.config, algo_config=settings or None), notes=notes)
        return plan


@attributed("planning the run")
def plan_run(model: nn.Module, config: QConfig, codes_of: CodesOf = MappingProxyType({}), carried: Sequence[str] | None = None) -> Run:
    """Plan a run. Return a `Run` with the plan and the algorithms for a model and a configuration.

    `Run.with_data` adds the data and the memory mode.

    The model is not changed, except that fused experts become separate layers if they are to be quantized.
    The plan has a copy of ``config``, so later changes of ``config`` have no effect on the run.

    Args:
        model: The model. Its tensors may be on the meta device.
        config: The quantization configuration.
        codes_of: The layers that are quantized in the source. If the configuration does not quantize such a
            layer, the layer keeps its quantization, unless ``keep_prequantized_layers`` is False.
        carried: Names of the checkpoint's tensors that the model class does not use. If it is None, they are
            looked up in the checkpoint from which the model was loaded.

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
            f"'{algorithms.branching.name}' adds branches to layers that the run rounds, but {len(plan.kept)} layer(s) keep the source's "
            f"quantization: {folded(plan.kept)}. Set keep_prequantized_layers=False (--no-keep-prequantized), or leave out the algorithm"
        )
    if algorithms.branching is not None:
        plan = plan.with_own_codes(plan.sharing({row.name for row in plan.rows}))
    plan, algorithms = _resolved(model, attrs.evolve(plan, notes=(*plan.notes, *_notes(algorithms, plan))), algorithms)
    if algorithms.rounding_name is not None:
        plan = _with_rounding(plan, algorithms, {b.name for b in decoder_blocks(model, plan.architecture)})
    refuse_vectors(algorithms, plan.rows)
    return Run(plan, algorithms)


def _own_config(config: QConfig) -> QConfig:
    """Return a copy of a configuration in which the settings of each algorithm have the algorithm's own
    class.

    Raise ConfigError if the configuration is wrong for every model.
    """
    config = config.copied()
    directory = config.spill_directory
    if directory is not None and not Path(directory).is_dir():
        raise ConfigError(f"spill_directory='{directory}' is not a directory. Create it, or give one on a disk with free space")
    if config.algo_config is not None:
        config.algo_config = [own_settings(settings) for settings in config.algo_config]
    return config


def _refuse_transforms(names: Sequence[str], plan: QuantPlan, model: nn.Module) -> None:
    """Raise ConfigError if the transforms ``names`` cannot be applied to the model of a plan."""
    if names and plan.kept:
        raise ConfigError(
            f"'{names[0]}' changes float weights, but {len(plan.kept)} layer(s) keep the quantization of the source: {folded(plan.kept)}. "
            f"Set keep_prequantized_layers=False (--no-keep-prequantized), so that these layers become float, or leave out '{names[0]}'"
        )
    if names and plan.architecture is None:
        raise ConfigError(
            f"'{names[0]}' needs facts about the model's family, but this {type(model).__name__} has no template. "
            "Register a template for the family, or leave out the algorithm"
        )


def _notes(algorithms: Algorithms, plan: QuantPlan) -> list[str]:
    """Return notes for a plan about the transforms, tunings and branches of a run."""
    notes = [_note(name) for name in algorithms.transforms]
    notes += [
        f"after rounding, each block is tuned by {name}, so that its output is closer to the float block's" for name in algorithms.tunings
    ]
    if notes and plan.architecture is not None and not plan.architecture.block_lists:
        notes.append(f"the blocks of '{plan.architecture.model_type}' are not known, so the whole model is changed as one block")
    if algorithms.branching is not None:
        notes.append(f"{algorithms.branching.name} adds branches to layers; a branch is computed when its layer is rounded")
    return notes


def _with_rounding(plan: QuantPlan, algorithms: Algorithms, blocks: Collection[str]) -> QuantPlan:
    """Return a plan with the name of the rounding algorithm in the rows of the layers that it rounds.

    Only layers in ``blocks`` are rounded by this algorithm.

    Raises:
        ConfigError: The rounding applies to no layer of the model.
        UnsupportedError: The rounding cannot round the scheme of a layer.
    """
    assert algorithms.rounding_name is not None
    named = {r.name for r in plan.quantized if _is_named_by(algorithms.rounding, r, blocks)}
    rows = with_algorithm(plan, algorithms, blocks)
    others = _by_type([r for r in rows if r.name in named and not r.is_linear])
    if not any(r.name in named and r.is_linear for r in rows):
        inside = next((r.name.removeprefix(f"{block}.") for r in plan.quantized if (block := _block_of(r, blocks)) is not None), None)
        of_types = f" (the algorithm rounds linear layers, but these names match {others})" if others else ""
        raise ConfigError(
            f"the algorithm '{algorithms.rounding_name}' matches no layer of this model{of_types}. The names in its configuration must be "
            f"relative to a block, such as '{inside or '(none)'}' in this model. Set inside_layer_modules, or "
            "use a template that names the family's projections (--template-file)"
        )
    refuse_excluded_schemes(algorithms.rounding_name, rows)
    by_type = [f"'{algorithms.rounding_name}' rounds linear layers; {others} are rounded to nearest"] if others else []
    warnings = (*plan.warnings, *_unmatched(algorithms, rows, blocks))
    return attrs.evolve(plan, rows=rows, notes=(*plan.notes, *by_type), warnings=warnings)


def with_algorithm(plan: QuantPlan, algorithms: Algorithms, blocks: Collection[str]) -> tuple[PlanRow, ...]:
    """Return the rows of a plan. Each row gets the name of the algorithm that chooses the layer's codes.

    Only layers in ``blocks`` get a name. A run uses this name when it rounds the layer.
    """
    name, rounding = algorithms.rounding_name, algorithms.rounding
    return tuple(attrs.evolve(r, algorithm=name) if r.has_codes_to_choose and _is_named_by(rounding, r, blocks) else r for r in plan.rows)


def _is_named_by(rounding: Rounding, row: PlanRow, blocks: Collection[str]) -> bool:
    """Return whether the rounding applies to layers with this name. The type of the layer is not checked."""
    block = _block_of(row, blocks) if row.has_quantized_weight and not row.is_kept else None
    return block is not None and rounding.applies_to(row.name.removeprefix(f"{block}."))


def _block_of(row: PlanRow, blocks: Collection[str]) -> str | None:
    """Return the full name of the decoder block that contains a layer, or None if no block contains it."""
    return next((name for name in owners(row.name) if name in blocks), None)


def _by_type(rows: Iterable[PlanRow]) -> str:
    """Return a text for messages with the number and the names of the layers of each type."""
    names_of: dict[str, list[str]] = {}
    for row in rows:
        names_of.setdefault(row.layer_type, []).append(row.name)
    return ", ".join(f"{len(names)} {layer_type} layer(s) ({folded(names)})" for layer_type, names in names_of.items())


def _note(name: str) -> str:
    """Return the note that a plan has for a transform."""
    return f"before rounding, each block is transformed by {name} (its output is unchanged)"


def _resolved(model: nn.Module, plan: QuantPlan, algorithms: Algorithms) -> tuple[QuantPlan, Algorithms]:
    """Resolve the settings of the transforms for this model. Return the plan and the algorithms that use
    them.
    """
    for name, transform in algorithms.transforms.items():
        if (resolved := transform.resolve_for_model(model, plan)) is not None:
            settings = [resolved.settings if a.name == name else a for a in plan.config.algo_config or []]
            plan = attrs.evolve(plan, config=attrs.evolve(plan.config, algo_config=settings), notes=(*plan.notes, *resolved.notes))
            algorithms = algorithms.with_settings(resolved.settings)
    return plan, algorithms


def _unmatched(algorithms: Algorithms, rows: Sequence[PlanRow], blocks: Collection[str]) -> Iterator[str]:
    """Yield a warning if the settings of the rounding name layers that no decoder block has."""
    names = [r.name.removeprefix(f"{block}.") for r in rows if (block := _block_of(r, blocks)) is not None]
    if unmatched := algorithms.rounding.unmatched(names):
        left = sum(1 for r in rows if r.has_quantized_weight and not r.is_kept and not r.algorithm)
        yield (
            f"the settings of '{algorithms.rounding_name}' name layers that no decoder block has: {', '.join(unmatched)}. {left} quantized "
            f"layers are rounded to nearest. A layer name in this model is '{names[-1] if names else '(none)'}'"
        )


def needs_two_passes(model: nn.Module, plan: QuantPlan, algorithms: Algorithms, data: Sequence[Call], device: torch.device) -> bool:
    """Return whether forward passes that wait inside a block would need more memory than allowed."""
    held = held_by_forwards(model, plan, algorithms, data)
    allowed = allowed_activations(plan.config, device)
    return allowed is not None and held > allowed


def held_by_forwards(model: nn.Module, plan: QuantPlan, algorithms: Algorithms, data: Sequence[Call]) -> int:
    """Return an estimate of the bytes that forward passes need while they wait inside a block.

    It is 0 if no forward pass waits inside a block.
    """
    if not algorithms.is_sequential:
        return 0
    held = held_bytes(model, plan, tokens_in(data), algorithms.streams)
    if any(has_static_scale(a.probabilities) for a in plan.attentions):
        held += held_probabilities(model, data)
    return held


def allowed_activations(config: QConfig, device: torch.device) -> int | None:
    """Return the number of bytes that activations may use.

    Return None if the configuration sets no limit and the free memory is unknown.
    """
    if config.activation_memory is not None:
        return config.activation_memory
    free = free_bytes(device)
    return None if free is None else int(SHARE * free)
