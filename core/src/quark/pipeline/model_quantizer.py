"""ModelQuantizer: the documented way in. Quantize a model in memory, in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import attrs
from torch import nn

from quark.algorithms import Rounding, RoundToNearest
from quark.environment import refuse_rival
from quark.errors import ConfigError, UnsupportedError
from quark.log import get_logger
from quark.model.blocks import decoder_blocks
from quark.model.family import architecture_of
from quark.model.mixtures import separate_experts
from quark.model.plan import QuantPlan, make_plan
from quark.model.plan_text import plan_lines
from quark.nn.attention_switch import refuse_unswitchable, switch_attention
from quark.pipeline.batches import Call, calls
from quark.pipeline.finite import refuse_non_finite
from quark.pipeline.memory import SHARE, free_bytes, held_bytes, tokens_in
from quark.pipeline.progress import reporting
from quark.pipeline.runner import run
from quark.pipeline.sink import InPlaceSink
from quark.plugins import algorithms
from quark.specs.enums import QuantizationMode
from quark.specs.model import QConfig

M = TypeVar("M", bound=nn.Module)

TWO_PASSES = (
    "activations of all calibration samples would take more memory than allowed (activation_memory): each block is passed twice, and its "
    "layers are calibrated on what its float weights give"
)


class ModelQuantizer:
    """Quantizes models by one configuration.

    Args:
        config: What each layer gets. It is never changed.
        multi_device: Documented; layers are quantized on whatever device they lie.

    Example:
        >>> from quark.torch import LLMTemplate, ModelQuantizer
        >>> config = LLMTemplate.get("llama").get_config(scheme="int4_wo_128")
        >>> quantizer = ModelQuantizer(config)           # then: model = quantizer.quantize_model(model)
    """

    def __init__(self, config: QConfig, multi_device: bool = False) -> None:
        refuse_rival()
        if not isinstance(config, QConfig):
            raise ConfigError(f"ModelQuantizer is given a QConfig, not a {type(config).__name__}: see LLMTemplate.get(…).get_config(…)")
        if config.quant_mode is not QuantizationMode.eager_mode:
            raise UnsupportedError("only quant_mode=QuantizationMode.eager_mode is offered: FX graph mode is not part of this framework")
        self.config = config
        self.multi_device = multi_device

    def plan(self, model: nn.Module) -> QuantPlan:
        """What would be done to ``model``, and why; meta tensors will do. Raises ConfigError with all that is wrong.

        Fused experts that are to be quantized are taken apart for it; the model computes what it did.
        """
        separate_experts(model, self.config)
        return make_plan(model, self.config, architecture_of(model))

    def quantize_model(self, model: M, dataloader: Iterable[Any] | None = None) -> M:
        """Quantize ``model`` in place, block by block, and return it.

        Args:
            model: Any module tree; a transformers model of a known family is worked block by block, another as one block.
            dataloader: Calibration data (see `quark.pipeline.batches.calls`). Needed only where activations have static scales, and read
                only then.

        Returns:
            The same object, its layers replaced, with the attributes ``quant_config``, ``quark_plan`` and ``quark_quantized``.

        Raises:
            ConfigError: The configuration does not fit the model.
            CalibrationError: Static scales are asked for without data.
            NonFiniteError: A weight or an activation holds NaN or Inf.
            UnsupportedError: An algorithm is asked for that no installed distribution implements; or attention is to be quantized in a
                model whose attention cannot be exchanged.
        """
        log = get_logger()
        rounding = rounding_of(self.config)
        plan = self.plan(model)
        data = calls(dataloader, wanted_by=_wishes(plan, rounding)) if plan.calibrated or rounding.needs else []
        two_passes = needs_two_passes(model, plan, rounding, data)
        if two_passes:
            plan = attrs.evolve(plan, notes=(*plan.notes, TWO_PASSES))
        for line in plan_lines(plan):
            log.info(line)
        attentions = [a.name for a in plan.attentions]
        if attentions:
            refuse_unswitchable(model, attentions)
        refuse_non_finite(model, plan.quantized)
        if attentions:
            switch_attention(model, attentions, eager=plan.config.softmax_quant_spec is not None)
        with reporting(len(data)) as progress:
            findings = run(model, plan, data, rounding, InPlaceSink(model), progress, two_passes=two_passes)
        model.quant_config, model.quark_plan, model.quark_quantized = self.config, plan, True  # type: ignore[assignment]
        model.quark_findings = findings  # type: ignore[assignment]
        findings.log()
        log.info("Model quantization has been completed.")
        return model

    @staticmethod
    def freeze(model: M, quantize: bool | None = None, runtime_options: object = None) -> M:
        """Documented step before an export. Weights are rounded as soon as a model is quantized, so this only ends training of them.

        Args:
            model: A quantized model, changed in place.
            quantize: Documented; without effect.
            runtime_options: Documented; without effect.

        Raises:
            ConfigError: The model has not been quantized.
        """
        if not getattr(model, "quark_quantized", False):
            raise ConfigError("freeze wants a model that quantize_model has returned: this one has not been quantized")
        return model.requires_grad_(False)


def needs_two_passes(model: nn.Module, plan: QuantPlan, rounding: Rounding, data: Sequence[Call]) -> bool:
    """Whether forwards that wait inside a block would hold more than the configuration, or the machine, allows."""
    if not rounding.needs:
        return False
    blocks = decoder_blocks(model, plan.architecture)
    inside = [[r for r in plan.quantized if b.owns(r.name)] for b in blocks]
    streams = 2 if any(kind.wants_float for kind in rounding.needs) else 1
    held = held_bytes(blocks, inside, model, tokens_in(data), streams)
    allowed = plan.config.activation_memory
    if allowed is None:
        free = free_bytes(next(model.parameters()).device)
        allowed = held if free is None else int(SHARE * free)
    return held > allowed


def rounding_of(config: QConfig) -> Rounding:
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
        return RoundToNearest()
    settings, processor = roundings[0]
    return cast("Rounding", processor(settings))


def _wishes(plan: QuantPlan, rounding: Rounding) -> str:
    """What calibration data are wanted for."""
    static = "activations with static scales" if plan.calibrated else ""
    return " and ".join(w for w in (static, f"{type(rounding).__name__}" if rounding.needs else "") if w)
