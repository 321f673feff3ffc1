"""Settings of the algorithms that move scale between activations and weights: AWQ, SmoothQuant, AutoSmoothQuant."""

from __future__ import annotations

from typing import Any, Self

import attrs
from attrs import validators

from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.dataclass_view import with_dataclass_view
from quark_algos.fields import LEGACY, OWN, PRESETS, positive
from quark_algos.mappings.mapping import mappings_of

__all__ = ["COMPUTE_SCALE_LOSSES", "AWQConfig", "AutoSmoothQuantConfig", "SmoothQuantConfig"]

COMPUTE_SCALE_LOSSES = ("MSE", "MAE", "RMSE")


@attrs.define(kw_only=True)
class _SmoothingConfig(AlgoConfig):
    """What the three have in common: they move scale at the sites of a family."""

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> Self | None:
        """All sites of the family, in the documented form."""
        if cls.refusal(architecture) is not None:
            return None
        places = [site.documented() for site in mappings_of(architecture)]
        return cls(scaling_layers=places, model_decoder_layers=architecture.decoder_blocks)  # type: ignore[call-arg]

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        """Nothing is known that a scale could be folded into."""
        if architecture.decoder_blocks and mappings_of(architecture):
            return None
        return "no operation is known in its decoder blocks into which a scale can be folded"


@with_dataclass_view
@attrs.define(kw_only=True)
class AWQConfig(_SmoothingConfig):
    """Activation-aware weight quantization: scales that protect the channels with large activations (arXiv 2306.00978).

    Attributes:
        scaling_layers: One dict per place where a scale can be folded: ``prev_op``, ``layers``, ``inp``, ``module2inspect``; names are
            relative to a decoder block.
        model_decoder_layers: Full name of the list of decoder blocks.
        preset: ``"best"`` takes the scales of a block back where they do no good on held-out tokens; ``"reference"`` keeps them and warns.
        embedding_layers: Accepted from configurations before 0.6; not needed.
        num_attention_heads: Accepted from configurations before 0.12; the model knows it.
        num_key_value_heads: Likewise.
    """

    name: str = "awq"
    preset: str = attrs.field(default="best", validator=validators.in_(PRESETS), metadata=OWN)
    scaling_layers: list[dict[str, Any]] = attrs.field(factory=list)
    model_decoder_layers: str = ""
    embedding_layers: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    num_attention_heads: int = attrs.field(default=-1, repr=False, eq=False, metadata=LEGACY)
    num_key_value_heads: int = attrs.field(default=-1, repr=False, eq=False, metadata=LEGACY)


@with_dataclass_view
@attrs.define(kw_only=True)
class SmoothQuantConfig(_SmoothingConfig):
    """SmoothQuant: part of the activations' range goes into the weights (arXiv 2211.10438).

    Attributes:
        alpha: Share of the range that moves, 0 to 1. For the documented default of 1, which makes int8 worse by far where activations have
            outliers in many channels, the preset ``"best"`` takes 0.5, the paper's.
        scale_clamp_min: Smallest scale, above 0.
        scaling_layers: As in `AWQConfig`.
        model_decoder_layers: Full name of the list of decoder blocks.
        preset: ``"best"`` takes the scales of a block back where they do no good on held-out tokens; ``"reference"`` keeps them and warns.
        embedding_layers: Accepted from configurations before 0.6; not needed.
        num_attention_heads: Accepted from configurations before 0.12; the model knows it.
        num_key_value_heads: Likewise.

    Raises:
        ValueError: ``alpha`` or ``scale_clamp_min`` is out of its range.
    """

    name: str = "smooth"
    preset: str = attrs.field(default="best", validator=validators.in_(PRESETS), metadata=OWN)
    alpha: float = attrs.field(default=1.0, validator=[validators.ge(0), validators.le(1)])
    scale_clamp_min: float = attrs.field(default=1e-3, validator=positive)
    scaling_layers: list[dict[str, Any]] = attrs.field(factory=list)
    model_decoder_layers: str = ""
    embedding_layers: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    num_attention_heads: int = attrs.field(default=-1, repr=False, eq=False, metadata=LEGACY)
    num_key_value_heads: int = attrs.field(default=-1, repr=False, eq=False, metadata=LEGACY)


@with_dataclass_view
@attrs.define(kw_only=True)
class AutoSmoothQuantConfig(_SmoothingConfig):
    """SmoothQuant with the share searched for each place.

    Attributes:
        scaling_layers: As in `AWQConfig`; None where the family's own are meant.
        model_decoder_layers: Full name of the list of decoder blocks.
        compute_scale_loss: What the search minimises: one of `COMPUTE_SCALE_LOSSES`.
        preset: ``"best"`` takes the scales of a block back where they do no good on held-out tokens; ``"reference"`` keeps them and warns.
        embedding_layers: Accepted from configurations before 0.6; not needed.
        num_attention_heads: Accepted from configurations before 0.12; the model knows it.
        num_key_value_heads: Likewise.

    Raises:
        ValueError: ``compute_scale_loss`` is none of them.
    """

    name: str = "autosmoothquant"
    preset: str = attrs.field(default="best", validator=validators.in_(PRESETS), metadata=OWN)
    scaling_layers: list[dict[str, Any]] | None = None
    model_decoder_layers: str | None = None
    compute_scale_loss: str = attrs.field(default="MSE", validator=validators.in_(COMPUTE_SCALE_LOSSES))
    embedding_layers: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    num_attention_heads: int = attrs.field(default=-1, repr=False, eq=False, metadata=LEGACY)
    num_key_value_heads: int = attrs.field(default=-1, repr=False, eq=False, metadata=LEGACY)
