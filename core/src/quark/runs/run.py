"""One run, got ready: its plan, its rounding and its data, checked together before any weight is touched. Then the run itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from quark.algorithms import STAGES, NamesLayers, ResolvesForModel, Rounding, RoundToNearest, Transform, ValidatedTransform
from quark.calibration.batches import Call, calls
from quark.calibration.plugin_checks import CheckedRounding, CheckedTransform, refuse_strange
from quark.calibration.transform_validation import validate_transforms
from quark.checkpoint.content import CheckpointContent
from quark.config.algorithm import AlgoConfig, StoredAlgoConfig
from quark.config.model import QConfig
from quark.errors import ConfigError, UnsupportedError
from quark.hf.attention_switch import refuse_unswitchable, switch_attention
from quark.log import get_logger
from quark.planning.decoder_blocks import decoder_blocks
from quark.planning.family import architecture_of
from quark.planning.mixtures import separate_experts
from quark.planning.plan import PlanRow, QuantPlan, has_static_scale, make_plan
from quark.planning.plan_text import plan_lines, warning_lines
from quark.plugins import algorithms
from quark.plugins.attribution import attributed, origin
from quark.runs.memory import SHARE, free_bytes, held_bytes, held_probabilities, tokens_in
from quark.runs.progress import reporting
from quark.runs.quantize_blocks import run
from quark.runs.sink import BlockSink
from quark.runs.source import BlockSource
from quark.templates.algorithms import algo_config_from_dict

TWO_PASSES = (
    "activations of all calibration samples would take more memory than allowed (activation_memory): each block is passed twice, and its "
    "layers are calibrated on what its float weights give"
)


@attrs.frozen(eq=False)
class Algorithms:
    """What changes weights in one run.

    Attributes:
        transforms: In the order in which they go, with their registered ``names``.
        rounding: Chooses codes.
        rounding_name: Registered name of the algorithm it comes from; None for round-to-nearest.
    """

    transforms: tuple[Transform, ...]
    names: tuple[str, ...]
    rounding: Rounding
    rounding_name: str | None

    @property
    def by_name(self) -> dict[str, Transform]:
        """Transforms by their names, in order."""
        return dict(zip(self.names, self.transforms, strict=True))

    def checked_rounding(self) -> Rounding:
        """The rounding as a run has it: a plugin's is looked at."""
        if self.rounding_name is None:
            return self.rounding
        return CheckedRounding(self.rounding, origin("algorithms", self.rounding_name))

    def checked_transforms(self, config: QConfig) -> list[Transform]:
        """The transforms that a configuration still names, in order, as a run has them."""
        left = {settings.name: settings for settings in config.algo_config or []}
        return [
            CheckedTransform(transform, origin("algorithms", name), runs_with_model=left[name].runs_with_model())
            for name, transform in self.by_name.items()
            if name in left
        ]

    @property
    def needs_data(self) -> bool:
        """Whether any of them looks at inputs."""
        return bool(self.rounding.needs) or any(t.needs for t in self.transforms)


@attrs.frozen(eq=False)
class Job:
    """What is to be done to one model.

    Attributes:
        plan: Made from this very model.
        algorithms: What changes weights.
        data: Calibration forwards; empty where nothing wants them, or could do with them and got none.
        two_passes: Whether each block is passed twice, for want of memory.
    """

    plan: QuantPlan
    algorithms: Algorithms
    data: Sequence[Call]
    two_passes: bool

    @attributed("quantizing the model")
    def run(self, model: nn.Module, sink: BlockSink, source: BlockSource | None = None) -> None:
        """Quantize ``model``; what is known of it then are its attributes ``quark_plan``, ``quark_report`` and so on.

        Transforms that would do no good to the whole model, or turn out to change none of its blocks, are left out; the plan that the model
        has then says so.
        """
        model.quark_plan = self.plan  # type: ignore[assignment]
        validations = validate_transforms(model, self.plan, self.algorithms.by_name, self.data)
        plan = self._plan_without(model, [name for name, validation in validations.items() if not validation.goes_on])
        switch_if_wanted(model, plan)
        model.quant_config, model.quark_plan = plan.config, plan  # type: ignore[assignment]
        with reporting(len(self.data)) as progress:
            report = run(
                model,
                plan,
                self.data,
                self.algorithms.checked_rounding(),
                sink,
                progress,
                source,
                two_passes=self.two_passes,
                transforms=self.algorithms.checked_transforms(plan.config),
            )
        applied = [name for name in self.algorithms.names if name in {a.name for a in plan.config.algo_config or []}]
        idle = [name for place, name in enumerate(applied) if place in report.idle]
        plan = self._without_idle(plan, idle)
        model.quant_config, model.quark_plan = plan.config, plan  # type: ignore[assignment]
        sink.finish(CheckpointContent(model, plan.config, plan))
        report.validated = {name: validation.metrics() for name, validation in validations.items()}
        model.quark_quantized, model.quark_report = True, report  # type: ignore[assignment]
        report.log()
        get_logger().info("Model quantization has been completed.")

    def _plan_without(self, model: nn.Module, names: Sequence[str]) -> QuantPlan:
        """The plan as it is without some algorithms."""
        if not names:
            return self.plan
        left = [a for a in self.plan.config.algo_config or [] if a.name not in names]
        plan = plan_of(model, attrs.evolve(self.plan.config, algo_config=left or None))
        notes = [TWO_PASSES] if self.two_passes else []
        return attrs.evolve(plan, notes=(*plan.notes, *notes, *(f"left out, since it would do no good: {name}" for name in names)))

    def _without_idle(self, plan: QuantPlan, names: Sequence[str]) -> QuantPlan:
        """A plan without those transforms that have changed no block, which is said; one that also rounds stays."""
        rounding = self.algorithms.rounding_name
        for name in names:
            effect = "only its rounding is in the result" if name == rounding else "the result does not name it"
            get_logger().warning(
                f"The algorithm '{name}' has left every block as it was, so {effect}; model.quark_report.transformed says why."
            )
            if name != rounding:
                settings = [a for a in plan.config.algo_config or [] if a.name != name]
                notes = (*(n for n in plan.notes if n != _note(name)), f"left out, since it has left every block as it was: {name}")
                plan = attrs.evolve(plan, config=attrs.evolve(plan.config, algo_config=settings or None), notes=notes)
        return plan


def _note(name: str) -> str:
    """What a plan says of a transform."""
    return f"each block is changed first, and computes what it did: {name}"


@attributed("planning the run")
def prepared(model: nn.Module, config: QConfig, dataloader: Iterable[Any] | None, device: torch.device) -> Job:
    """Plan a run, and say so. Nothing of ``model`` is changed, but that fused experts are taken apart.

    Args:
        model: Meta tensors will do.
        config: What each layer gets.
        dataloader: Calibration data (see `quark.calibration.batches.calls`), read where something wants them.
        device: Where the forwards run.

    Raises:
        ConfigError: The configuration does not fit the model.
        CalibrationError: Data are wanted, and there are none.
        UnsupportedError: An algorithm cannot run, or attention is to be quantized and cannot be exchanged.
    """
    plan = plan_of(model, config)
    chosen = algorithms_of(plan.config)
    if plan.attentions:
        refuse_unswitchable(model, [a.name for a in plan.attentions])
    wants = wants_data(plan, chosen)
    judges = dataloader is not None and any(isinstance(t, ValidatedTransform) for t in chosen.transforms)
    data = calls(dataloader, wanted_by=wants, model=model) if wants or judges else []
    two_passes = needs_two_passes(model, plan, chosen.rounding, data, device)
    if two_passes:
        plan = attrs.evolve(plan, notes=(*plan.notes, TWO_PASSES))
    warned = warning_lines(plan)
    for line in plan_lines(plan):
        (get_logger().warning if line in warned else get_logger().info)(line)
    return Job(plan, chosen, data, two_passes)


@attributed("planning the run")
def plan_of(model: nn.Module, config: QConfig) -> QuantPlan:
    """What would be done to ``model``; fused experts that are to be quantized are taken apart. Raises ConfigError, UnsupportedError.

    The plan has a copy of ``config``, in which algorithms have their own settings: what is changed afterwards has no effect on the run.
    """
    config = config.copied()
    if config.algo_config is not None:
        config.algo_config = [own_settings(settings) for settings in config.algo_config]
    chosen = algorithms_of(config)
    separate_experts(model, config)
    plan = make_plan(model, config, architecture_of(model))
    if chosen.transforms and plan.architecture is None:
        raise ConfigError(
            f"'{chosen.names[0]}' goes by facts about the model's family, and this {type(model).__name__} is of none that is known: "
            "register a template for it, or leave the algorithm out"
        )
    notes = [_note(name) for name in chosen.names]
    if notes and plan.architecture is not None and plan.architecture.decoder_blocks is None:
        notes.append(f"no decoder blocks are known of '{plan.architecture.model_type}': the whole model is changed as one block")
    plan = _resolved(model, attrs.evolve(plan, notes=(*plan.notes, *notes)), chosen)
    if chosen.rounding_name is None:
        return plan
    blocks = [b.name for b in decoder_blocks(model, plan.architecture)]
    rows = tuple(attrs.evolve(r, algorithm=chosen.rounding_name) if _is_taken(r, blocks, chosen.rounding) else r for r in plan.rows)
    if not any(r.algorithm for r in rows):
        raise ConfigError(
            f"the algorithm '{chosen.rounding_name}' takes none of this model's layers: the names in its configuration are relative to a "
            f"decoder block, and a layer here is '{plan.rows[-1].name if plan.rows else '(none)'}'"
        )
    return attrs.evolve(plan, rows=rows, warnings=(*plan.warnings, *_unmatched(chosen, rows, blocks)))


def _unmatched(chosen: Algorithms, rows: Sequence[PlanRow], blocks: Sequence[str]) -> Iterator[str]:
    """What the settings of the rounding name and the model does not have."""
    if isinstance(chosen.rounding, NamesLayers):
        names = [r.name.removeprefix(f"{block}.") for r in rows if (block := _block_of(r, blocks)) is not None]
        unmatched = chosen.rounding.unmatched(names)
        if unmatched:
            left = sum(1 for r in rows if r.config is not None and r.config.weight is not None and not r.algorithm)
            yield (
                f"'{chosen.rounding_name}' names layers that no decoder block has: {', '.join(unmatched)}. {left} quantized layers are "
                f"rounded to nearest; a layer here is '{names[-1] if names else '(none)'}'"
            )


def _resolved(model: nn.Module, plan: QuantPlan, chosen: Algorithms) -> QuantPlan:
    """The plan with the settings of transforms as they hold for this very model."""
    for name, transform in zip(chosen.names, chosen.transforms, strict=True):
        if isinstance(transform, ResolvesForModel):
            found = transform.resolve_for_model(model, plan)
            settings = [found.settings if a.name == name else a for a in plan.config.algo_config or []]
            plan = attrs.evolve(plan, config=attrs.evolve(plan.config, algo_config=settings), notes=(*plan.notes, *found.notes))
    return plan


def _is_taken(row: PlanRow, blocks: Sequence[str], rounding: Rounding) -> bool:
    """Whether the rounding chooses the codes of a layer."""
    if row.config is None or row.config.weight is None or row.module_type != nn.Linear.__name__:
        return False
    block = _block_of(row, blocks)
    return block is not None and rounding.applies_to(row.name.removeprefix(f"{block}."))


def _block_of(row: PlanRow, blocks: Sequence[str]) -> str | None:
    """Full name of the decoder block that a layer lies in."""
    return next((b for b in blocks if b == "" or row.name.startswith(f"{b}.")), None)


def switch_if_wanted(model: nn.Module, plan: QuantPlan) -> None:
    """Exchange the attention of the modules of which the plan quantizes something."""
    if plan.attentions:
        switch_attention(model, [a.name for a in plan.attentions], eager=plan.config.softmax_quant_spec is not None)


def needs_two_passes(model: nn.Module, plan: QuantPlan, rounding: Rounding, data: Sequence[Call], device: torch.device) -> bool:
    """Whether forwards that wait inside a block would hold more than the configuration, or the machine, allows."""
    if not rounding.needs:
        return False
    blocks = decoder_blocks(model, plan.architecture)
    inside = [[r for r in plan.quantized if b.owns(r.name)] for b in blocks]
    streams = 2 if any(kind.wants_float for kind in rounding.needs) else 1
    held = held_bytes(blocks, inside, model, tokens_in(data), streams)
    if any(has_static_scale(a.probabilities) for a in plan.attentions):
        held += held_probabilities(model, data)
    allowed = plan.config.activation_memory
    if allowed is None:
        free = free_bytes(device)
        allowed = held if free is None else int(SHARE * free)
    return held > allowed


def algorithms_of(config: QConfig) -> Algorithms:
    """What the configured algorithms come down to: transforms in the order in which they go, and one rounding.

    Raises:
        UnsupportedError: An algorithm's distribution registers its configuration only.
        ConfigError: An algorithm is there twice, or there are two roundings, or two transforms of one kind.
    """
    transforms: dict[str, tuple[str, Transform]] = {}
    chosen: tuple[str, Rounding] | None = None
    names = [settings.name for settings in config.algo_config or []]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the algorithm '{name}' is named twice: a run has it once. Leave all but one out")
    for settings in config.algo_config or []:
        record = algorithms().get(settings.name)
        if record.processor is None:
            source = algorithms().source(settings.name)
            raise UnsupportedError(
                f"the algorithm '{settings.name}' cannot run: {source.distribution} {source.version} registers its configuration only. "
                "Leave algo_config out, or install a distribution that brings its processor"
            )
        made = _made(own_settings(settings), record.kind)
        if record.kind == "rounding":
            if chosen is not None:
                raise ConfigError(
                    f"'{chosen[0]}' and '{settings.name}' both choose the codes of weights: a run has one such algorithm. "
                    "Name the one that is wanted"
                )
            chosen = (settings.name, made)
        elif made.stage not in STAGES:
            source = algorithms().source(settings.name)
            raise ConfigError(
                f"the transform '{settings.name}' of {source.distribution} {source.version} would never run: its stage is '{made.stage}', "
                f"and there are {', '.join(repr(stage) for stage in STAGES)}. Its author has to choose one of these"
            )
        elif made.stage in transforms:
            raise ConfigError(
                f"'{transforms[made.stage][0]}' and '{settings.name}' do the same thing by different rules ({made.stage}): the second "
                "would undo the first. Name the one that is wanted"
            )
        else:
            transforms[made.stage] = (settings.name, made)
    ordered = [transforms[stage] for stage in STAGES if stage in transforms]
    own = next((r for _, t in ordered if (r := t.rounding()) is not None), None)
    rounding_name, rounding = chosen or (next((n for n, t in ordered if t.rounding() is not None), None), own or RoundToNearest())
    return Algorithms(tuple(t for _, t in ordered), tuple(n for n, _ in ordered), rounding, rounding_name)


def own_settings(settings: AlgoConfig) -> AlgoConfig:
    """Settings as the algorithm's own class has them: those that were read from JSON are made of it.

    Raises:
        ConfigError: They are of another class, or have keys that are none of the algorithm's.
        UnknownNameError: No installed distribution has an algorithm of that name.
    """
    if isinstance(settings, StoredAlgoConfig):
        settings = algo_config_from_dict(settings.to_dict())
    own: type[AlgoConfig] = algorithms().load(settings.name, "config")
    if not isinstance(settings, own):
        raise ConfigError(
            f"algo_config holds a {type(settings).__name__} of the name '{settings.name}', whose settings are a {own.__name__}: give one"
        )
    return settings


def _made(settings: AlgoConfig, kind: str) -> Any:
    """The transform or the rounding of some settings."""
    whose = origin("algorithms", settings.name)
    processor = algorithms().load(settings.name, "processor")
    with attributed("being made of its settings", whose):
        made = processor(settings)
        refuse_strange(made, kind, whose)
    return made


def wants_data(plan: QuantPlan, chosen: Algorithms) -> str:
    """What calibration data are wanted for; empty where nothing wants them."""
    names = [*(n for n, t in zip(chosen.names, chosen.transforms, strict=True) if t.needs)]
    if chosen.rounding.needs and chosen.rounding_name not in names:
        names.append(chosen.rounding_name or type(chosen.rounding).__name__)
    static = ["activations with static scales"] if plan.calibrated else []
    return " and ".join([*static, *(f"the algorithm '{n}'" for n in names)])
