"""Settings of the algorithms that choose codes by the Hessian of a layer's inputs: GPTQ, GPTAQ, Qronos."""

from __future__ import annotations

from typing import Self

import attrs
from attrs import validators

from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.dataclass_view import with_dataclass_view
from quark.errors import ConfigError
from quark_algos.fields import LEGACY, OWN, PRESETS, positive
from quark_algos.mappings.mapping import linear_layers

__all__ = ["SCALE_SEARCHES", "GPTAQConfig", "GPTQConfig", "QronosConfig"]

SCALE_SEARCHES = ("minmax", "mse", "hessian")


@with_dataclass_view
@attrs.define(kw_only=True)
class _HessianConfig(AlgoConfig):
    """What the three have in common; see `GPTQConfig`."""

    block_size: int = attrs.field(default=128, validator=positive)
    desc_act: bool = True
    static_groups: bool = True
    preset: str = attrs.field(default="best", validator=validators.in_(PRESETS), metadata=OWN)
    scale_search: str | None = attrs.field(default=None, validator=validators.optional(validators.in_(SCALE_SEARCHES)), metadata=OWN)
    scale_refits: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)), metadata=OWN)
    descent_passes: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)), metadata=OWN)
    float64: bool = attrs.field(default=False, metadata=OWN)
    true_sequential: bool = attrs.field(default=True, repr=False, eq=False, metadata=LEGACY)
    embedding_layers: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)

    def __attrs_post_init__(self) -> None:
        if self.desc_act and not self.static_groups:
            raise ConfigError(
                f"{type(self).__name__}: desc_act=True with static_groups=False would scatter the columns of a group over the matrix; "
                "set static_groups=True, or desc_act=False"
            )

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> Self | None:
        """All projections of a decoder block, in the order in which data flows."""
        if cls.refusal(architecture) is not None:
            return None
        return cls(  # type: ignore[call-arg]
            inside_layer_modules=list(linear_layers(architecture)), model_decoder_layers=architecture.decoder_blocks
        )

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        """The projections are not known."""
        known = architecture.decoder_blocks and linear_layers(architecture)
        return None if known else "the projections of its decoder blocks are not known"


@with_dataclass_view
@attrs.define(kw_only=True)
class GPTQConfig(_HessianConfig):
    """GPTQ: columns are rounded one after another, each spreading its error over the rest (arXiv 2210.17323).

    Attributes:
        block_size: Columns between two updates of the rest of the matrix. It changes the speed, and the last bits.
        damp_percent: Share of the Hessian's mean diagonal that is added to it, above 0 and below 1.
        desc_act: Go through the columns by descending diagonal of the Hessian.
        static_groups: Find the groups' scales before any column is rounded; needed with ``desc_act``.
        inside_layer_modules: Names of the linear layers, relative to a decoder block; ``*`` stands for anything. Empty: all of them.
        model_decoder_layers: Full name of the list of decoder blocks; documented, the model's template knows it.
        preset: ``"reference"`` is the published algorithm with the documented defaults; ``"best"`` also searches scales by what they do to
            the outputs, takes from the Hessian what is likely to be chance, and damps by 0.05 at least. Single choices below go before it.
        scale_search: Of group scales: ``"minmax"``, ``"mse"`` of the weights, or ``"hessian"``, of the outputs; None as the preset has it.
        scale_refits: How often scales are fitted to the finished codes, and the weight rounded anew; None as the preset has it.
        descent_passes: Sweeps of coordinate descent over the finished codes; None as the preset has it.
        float64: Sum and factor the Hessian in float64.
        true_sequential: Accepted from configurations before 0.12; calibration is sequential here in any case.
        embedding_layers: Accepted from configurations before 0.6; not needed.

    Raises:
        ConfigError: (a ValueError) ``desc_act`` without ``static_groups``.
        ValueError: A number is out of its range.
    """

    name: str = "gptq"
    damp_percent: float = attrs.field(default=0.01, validator=[positive, validators.lt(1)])
    inside_layer_modules: list[str] = attrs.field(factory=list)
    model_decoder_layers: str = ""


@with_dataclass_view
@attrs.define(kw_only=True)
class GPTAQConfig(GPTQConfig):
    """GPTAQ: GPTQ that also makes up for the error of the inputs that earlier layers have left (arXiv 2504.02692).

    The preset ``"reference"`` corrects as published, each column for what those before it have left; ``"best"`` all columns before any is
    rounded, by no more than does good on held-out tokens.

    Attributes:
        alpha: Share of that correction which is made.
        correction_damping: Share of the Hessian's mean diagonal that holds the correction back; None as the preset has it.
    """

    name: str = "gptaq"
    alpha: float = 0.25
    correction_damping: float | None = attrs.field(default=None, validator=validators.optional(positive), metadata=OWN)


@with_dataclass_view
@attrs.define(kw_only=True)
class QronosConfig(_HessianConfig):
    """Qronos: corrects for quantized inputs and weights together, then goes on as GPTQ (arXiv 2505.11695).

    Attributes:
        inside_layer_modules: Names of the linear layers, relative to a decoder block.
        model_decoder_layers: Full name of the list of decoder blocks.
        alpha: Damping, as a share of the Hessian's largest eigenvalue, above 0; of the preset "reference".
        beta: Documented; scale of the Hessian's inverse before its second factorization. There is no inverse here, and no second one.
        correction_share: Share of the correction for quantized inputs which is made, 0 to 1; None as the preset has it.
        correction_damping: Share of the Hessian's mean diagonal that holds the correction back; None as the preset has it.
    """

    name: str = "qronos"
    inside_layer_modules: list[str]
    model_decoder_layers: str
    alpha: float = attrs.field(default=1e-3, validator=positive)
    beta: float = attrs.field(default=1e4, validator=positive)
    correction_share: float | None = attrs.field(
        default=None, validator=validators.optional([validators.ge(0), validators.le(1)]), metadata=OWN
    )
    correction_damping: float | None = attrs.field(default=None, validator=validators.optional(positive), metadata=OWN)
