"""Settings of AWQ, SmoothQuant and AutoSmoothQuant. These algorithms move scales from activations into
weights.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

import attrs
from attrs import validators

from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.fields import with_dataclass_view
from quark.plugins import OptionNote
from quark_algos.fields import LEGACY, OWN, PRESETS, UNUSED, given, of_preset, positive, with_positional
from quark_algos.mappings.mapping import mappings_of

__all__ = ["BEST_ALPHA", "COMPUTE_SCALE_LOSSES", "AWQConfig", "AutoSmoothQuantConfig", "SmoothQuantConfig"]

COMPUTE_SCALE_LOSSES = ("MSE", "MAE", "RMSE")
BEST_ALPHA = 0.5
"""The migration strength of SmoothQuant with the preset "best".

AMD Quark's default, 1, moves the whole range of the activations into the weights.
"""


@attrs.define(kw_only=True)
class _EqualizationConfig(AlgoConfig):
    """Base class of the three configurations of this module. Each of them has a field ``scaling_layers``,
    which lists the mappings.

    Attributes:
        embedding_layers: A field of configurations from versions before 0.6. It is ignored.
        num_attention_heads: A field of configurations from versions before 0.12. It is ignored, because the
            number is read from the model's configuration.
        num_key_value_heads: A field of configurations from versions before 0.12. It is ignored, because the
            number is read from the model's configuration.
    """

    embedding_layers: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)
    num_attention_heads: int = attrs.field(default=-1, repr=False, eq=False, metadata=LEGACY)
    num_key_value_heads: int = attrs.field(default=-1, repr=False, eq=False, metadata=LEGACY)

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> Self | None:
        """Return settings whose ``scaling_layers`` list all mappings of the architecture.

        Return None if the architecture has no mappings.
        """
        if cls.refusal(architecture) is not None:
            return None
        entries = [mapping.documented() for mapping in mappings_of(architecture)]
        return cls(scaling_layers=entries, model_decoder_layers=architecture.decoder_blocks)  # type: ignore[call-arg]

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        """Return why the algorithm cannot be used with an architecture, or None if it can be used.

        The reason is that the architecture names no layer into which a scale can be folded.
        """
        if architecture.decoder_blocks and mappings_of(architecture):
            return None
        return "its template names no operation that can absorb a scale"


@with_positional("name", "scaling_layers", "model_decoder_layers")
@with_dataclass_view
@attrs.define(kw_only=True)
class AWQConfig(_EqualizationConfig):
    """Settings of AWQ, activation-aware weight quantization (arXiv 2306.00978).

    AWQ uses scales to protect the channels with large activations.

    Attributes:
        scaling_layers: A list with one dict per mapping. ``prev_op`` is the name of the smooth layer, and
            ``layers`` are the names of the balance layers. AMD Quark's keys ``inp`` and ``module2inspect``
            are accepted, too. Names are relative to a decoder block.
        model_decoder_layers: Full name of the list of decoder blocks. It belongs to AMD Quark's public API
            and is not used, because the name comes from the template.
        preset: ``"best"`` or ``"reference"``. The presets differ if the scales of a block do not reduce the
            block's error on held-out tokens: ``"best"`` undoes these scales, and ``"reference"`` applies them
            and logs a warning.
    """

    name: str = "awq"
    preset: str = attrs.field(default="best", validator=validators.in_(PRESETS), metadata=OWN)
    scaling_layers: list[dict[str, Any]] = attrs.field(factory=list)
    model_decoder_layers: str = attrs.field(default="", metadata=UNUSED)


@with_positional("name", "alpha", "scale_clamp_min", "scaling_layers", "model_decoder_layers")
@with_dataclass_view
@attrs.define(kw_only=True)
class SmoothQuantConfig(_EqualizationConfig):
    """Settings of SmoothQuant, which moves a part of the activations' range into the weights (arXiv
    2211.10438).

    Attributes:
        alpha: Migration strength, from 0 to 1. It is the exponent of the activations' range. The default of
            AMD Quark is 1, which makes int8 models much less accurate if activations have outliers in many
            channels. If you do not give ``alpha``, the preset ``"best"`` uses 0.5, as the paper does.
        scale_clamp_min: The smallest scale. It must be above 0.
        scaling_layers: As in `AWQConfig`.
        model_decoder_layers: As in `AWQConfig`.
        preset: As in `AWQConfig`.

    Raises:
        ValueError: ``alpha`` or ``scale_clamp_min`` is outside its range.
    """

    name: str = "smooth"
    preset: str = attrs.field(default="best", validator=validators.in_(PRESETS), metadata=OWN)
    alpha: Annotated[float, OptionNote(examples=(0.25, 0.75))] = attrs.field(
        default=of_preset(1.0), validator=[validators.ge(0), validators.le(1)]
    )
    scale_clamp_min: Annotated[float, OptionNote(examples=(2.0, 4.0), beside={"preset": "reference"})] = attrs.field(
        default=1e-3, validator=positive
    )
    scaling_layers: list[dict[str, Any]] = attrs.field(factory=list)
    model_decoder_layers: str = attrs.field(default="", metadata=UNUSED)

    def resolved(self) -> Self:
        """Return a copy of the settings in which ``alpha`` has the preset's value, unless the user has given
        ``alpha``.
        """
        return attrs.evolve(self, alpha=given(self.alpha, BEST_ALPHA if self.preset == "best" else None))


@with_positional("name", "scaling_layers", "model_decoder_layers", "compute_scale_loss")
@with_dataclass_view
@attrs.define(kw_only=True)
class AutoSmoothQuantConfig(_EqualizationConfig):
    """Settings of AutoSmoothQuant: SmoothQuant with a search for the alpha of each mapping.

    Attributes:
        scaling_layers: As in `AWQConfig`. If it is None, all mappings of the architecture are used.
        model_decoder_layers: As in `AWQConfig`.
        compute_scale_loss: The loss that the search minimizes. It is one of `COMPUTE_SCALE_LOSSES`.
        preset: As in `AWQConfig`.

    Raises:
        ValueError: ``compute_scale_loss`` is not in `COMPUTE_SCALE_LOSSES`.
    """

    name: str = "autosmoothquant"
    preset: str = attrs.field(default="best", validator=validators.in_(PRESETS), metadata=OWN)
    scaling_layers: list[dict[str, Any]] | None = None
    model_decoder_layers: str | None = attrs.field(default=None, metadata=UNUSED)
    compute_scale_loss: str = attrs.field(default="MSE", validator=validators.in_(COMPUTE_SCALE_LOSSES))
