"""One run, got ready: its plan, its rounding and its data, checked together before any weight is touched. Then the run itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import attrs
import torch
from torch import nn

from quark.algorithms import Rounding, RoundToNearest
from quark.errors import ConfigError, UnsupportedError
from quark.log import get_logger
from quark.model.blocks import decoder_blocks
from quark.model.family import architecture_of
from quark.model.mixtures import separate_experts
from quark.model.plan import PlanRow, QuantPlan, make_plan
from quark.model.plan_text import plan_lines
from quark.nn.attention_switch import refuse_unswitchable, switch_attention
from quark.pipeline.batches import Call, calls
from quark.pipeline.memory import SHARE, free_bytes, held_bytes, tokens_in
from quark.pipeline.progress import reporting
from quark.pipeline.runner import run
from quark.pipeline.sink import BlockSink
from quark.pipeline.source import BlockSource
from quark.plugins import algorithms
from quark.specs.algorithm import AlgoConfig
from quark.specs.model import QConfig

TWO_PASSES = (
    "activations of all calibration samples would take more memory than allowed (activation_memory): each block is passed twice, and its "
    "layers are calibrated on what its float weights give"
)


@attrs.frozen(eq=False)
class Job:
    """What is to be done to one model.

    Attributes:
        plan: Made from this very model.
        rounding: Chooses codes.
        data: Calibration forwards; empty where nothing wants them.
        two_passes: Whether each block is passed twice, for want of memory.
    """

    plan: QuantPlan
    rounding: Rounding
    data: Sequence[Call]
    two_passes: bool

    def run(self, model: nn.Module, sink: BlockSink, source: BlockSource | None = None) -> None:
        """Quantize ``model``; what is known of it then are its attributes ``quark_plan``, ``quark_findings`` and so on."""
        switch_if_wanted(model, self.plan)
        model.quant_config, model.quark_plan = self.plan.config, self.plan  # type: ignore[assignment]
        with reporting(len(self.data)) as progress:
            findings = run(model, self.plan, self.data, self.rounding, sink, progress, source, two_passes=self.two_passes)
        model.quark_quantized, model.quark_findings = True, findings  # type: ignore[assignment]
        findings.log()
        get_logger().info("Model quantization has been completed.")


def prepared(model: nn.Module, config: QConfig, dataloader: Iterable[Any] | None, device: torch.device) -> Job:
    """Plan a run, and say so. Nothing of ``model`` is changed, but that fused experts are taken apart.

    Args:
        model: Meta tensors will do.
        config: What each layer gets.
        dataloader: Calibration data (see `quark.pipeline.batches.calls`), read where something wants them.
        device: Where the forwards run.

    Raises:
        ConfigError: The configuration does not fit the model.
        CalibrationError: Data are wanted, and there are none.
        UnsupportedError: An algorithm cannot run, or attention is to be quantized and cannot be exchanged.
    """
    rounding = rounding_of(config)
    plan = plan_of(model, config)
    if plan.attentions:
        refuse_unswitchable(model, [a.name for a in plan.attentions])
    wants = wants_data(plan, rounding)
    data = calls(dataloader, wanted_by=wants) if wants else []
    two_passes = needs_two_passes(model, plan, rounding, data, device)
    if two_passes:
        plan = attrs.evolve(plan, notes=(*plan.notes, TWO_PASSES))
    for line in plan_lines(plan):
        get_logger().info(line)
    return Job(plan, rounding, data, two_passes)


def plan_of(model: nn.Module, config: QConfig) -> QuantPlan:
    """What would be done to ``model``; fused experts that are to be quantized are taken apart for it. Raises ConfigError."""
    separate_experts(model, config)
    plan = make_plan(model, config, architecture_of(model))
    settings, rounding = _rounding_of(config)
    if settings is None:
        return plan
    blocks = [b.name for b in decoder_blocks(model, plan.architecture)]
    rows = tuple(attrs.evolve(r, algorithm=settings.name) if _is_taken(r, blocks, rounding) else r for r in plan.rows)
    if not any(r.algorithm for r in rows):
        raise ConfigError(
            f"the algorithm '{settings.name}' takes none of this model's layers: the names in its configuration are relative to a decoder "
            f"block, and a layer here is '{plan.rows[-1].name if plan.rows else '(none)'}'"
        )
    return attrs.evolve(plan, rows=rows)


def _is_taken(row: PlanRow, blocks: Sequence[str], rounding: Rounding) -> bool:
    """Whether the rounding chooses the codes of a layer."""
    if row.config is None or row.config.weight is None or row.module_type != nn.Linear.__name__:
        return False
    block = next((b for b in blocks if b == "" or row.name.startswith(f"{b}.")), None)
    return block is not None and rounding.takes(row.name.removeprefix(f"{block}."))


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
    allowed = plan.config.activation_memory
    if allowed is None:
        free = free_bytes(device)
        allowed = held if free is None else int(SHARE * free)
    return held > allowed


def rounding_of(config: QConfig) -> Rounding:
    """What chooses codes; raises as `_rounding_of`."""
    return _rounding_of(config)[1]


def _rounding_of(config: QConfig) -> tuple[AlgoConfig | None, Rounding]:
    """What chooses codes: the one rounding among the configured algorithms, or round-to-nearest.

    Raises:
        UnsupportedError: An algorithm's distribution registers its configuration only.
        ConfigError: There are two roundings.
    """
    roundings = []
    for settings in config.algo_config or []:
        record = algorithms().get(settings.name)
        if record.processor is None:
            source = algorithms().source(settings.name)
            raise UnsupportedError(
                f"the algorithm '{settings.name}' cannot run: {source.distribution} {source.version} registers its configuration only. "
                "Leave algo_config out, or install a distribution that brings its processor"
            )
        if record.kind == "rounding":
            roundings.append((settings, algorithms().load(settings.name, "processor")))
    if len(roundings) > 1:
        names = " and ".join(f"'{settings.name}'" for settings, _ in roundings)
        raise ConfigError(f"{names} both choose the codes of weights: a run has one such algorithm. Name the one that is wanted")
    if not roundings:
        return None, RoundToNearest()
    settings, processor = roundings[0]
    return settings, cast("Rounding", processor(settings))


def wants_data(plan: QuantPlan, rounding: Rounding) -> str:
    """What calibration data are wanted for; empty where nothing wants them."""
    static = "activations with static scales" if plan.calibrated else ""
    name = next((f"the algorithm '{r.algorithm}'" for r in plan.rows if r.algorithm), type(rounding).__name__)
    return " and ".join(w for w in (static, name if rounding.needs else "") if w)
