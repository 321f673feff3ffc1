"""Settings of GPTQ, GPTAQ and Qronos, which choose codes by the Hessian of a layer's input; their recipes.

A `Recipe` holds the settings of any of the three as one set of parameters, with the preset resolved.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Self, cast

import attrs
from attrs import validators

from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.fields import with_dataclass_view
from quark.errors import ConfigError
from quark.plugins import OptionNote
from quark_algos.fields import LEGACY, OWN, PRESETS, UNUSED, given, is_given, of_preset, positive, with_positional
from quark_algos.mappings.mapping import linear_layers

__all__ = [
    "BEST_DAMPING",
    "BEST_SHARE",
    "SCALE_SEARCHES",
    "GPTAQConfig",
    "GPTQConfig",
    "QronosConfig",
    "Recipe",
    "is_named_by",
    "recipe_of",
]


SCALE_SEARCHES = ("minmax", "mse", "hessian")
_ALPHA = 1e-3
"""Damping of Qronos, as a share of H's largest eigenvalue, in AMD Quark."""


@with_dataclass_view
@attrs.define(kw_only=True)
class _HessianConfig(AlgoConfig):
    """Base of the three configurations.

    Attributes:
        block_size: Columns between two updates of the remaining matrix; changes the speed, and results by
            rounding only.
        desc_act: act_order: round columns by descending diagonal of the Hessian.
        static_groups: Compute the scales of all groups before any column is rounded; required with
            ``desc_act``.
        preset: ``"reference"`` is the published algorithm with AMD Quark's defaults; ``"best"`` also searches
            scales by the output error, shrinks the Hessian if tokens are few, and uses percdamp 0.05. Your
            settings override the preset.
        scale_search: How group scales are found: ``"minmax"``, ``"mse"`` (error of the weights) or
            ``"hessian"`` (error of the outputs); None for the preset's value.
        float64: Accumulate and factor the Hessian in float64; slower, and changes results by rounding only.
        true_sequential: Accepted from configurations before 0.12; ignored, calibration is always sequential.
        embedding_layers: Accepted from configurations before 0.6; ignored.
    """

    block_size: Annotated[int, OptionNote(is_cost_only=True)] = attrs.field(default=128, validator=positive)
    desc_act: bool = True
    static_groups: Annotated[bool, OptionNote(beside={"desc_act": False})] = True
    preset: str = attrs.field(default="best", validator=validators.in_(PRESETS), metadata=OWN)
    scale_search: str | None = attrs.field(default=None, validator=validators.optional(validators.in_(SCALE_SEARCHES)), metadata=OWN)
    float64: Annotated[bool, OptionNote(is_cost_only=True)] = attrs.field(default=False, metadata=OWN)
    true_sequential: bool = attrs.field(default=True, repr=False, eq=False, metadata=LEGACY)
    embedding_layers: list[str] | None = attrs.field(default=None, repr=False, eq=False, metadata=LEGACY)

    def __attrs_post_init__(self) -> None:
        if self.desc_act and not self.static_groups:
            raise ConfigError(
                f"{type(self).__name__}: desc_act=True with static_groups=False would spread each group over the matrix: set "
                f"static_groups=True, or desc_act=False"
            )

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> Self | None:
        """Return settings with all projections of a decoder block, in the order in which data flows.

        If the facts name no projections, as inferred facts do, the settings name none, and all linear layers
        of the blocks are rounded. None if the blocks are not known.
        """
        if cls.refusal(architecture) is not None:
            return None
        is_known = architecture.attention_inputs or architecture.mixer or architecture.mlp_inputs
        return cls(  # type: ignore[call-arg]
            inside_layer_modules=list(linear_layers(architecture)) if is_known else [],
            model_decoder_layers=architecture.decoder_blocks,
        )

    @classmethod
    def refusal(cls, architecture: Architecture) -> str | None:
        """Return a reason if the decoder blocks are not known."""
        return None if architecture.decoder_blocks else "its template names no decoder blocks"


@with_positional("name", "block_size", "damp_percent", "desc_act", "static_groups", "inside_layer_modules", "model_decoder_layers")
@with_dataclass_view
@attrs.define(kw_only=True)
class GPTQConfig(_HessianConfig):
    """GPTQ (arXiv 2210.17323).

    Rounds columns one after another and compensates the error of each in the remaining columns.

    The base class has the other settings.

    Attributes:
        damp_percent: Damping (percdamp): the share of the Hessian's mean diagonal that is added to the
            diagonal, above 0 and below 1. By default, the preset ``"best"`` uses 0.05.
        inside_layer_modules: Names of the linear layers, relative to a decoder block; ``*`` matches any
            characters. Empty: all layers.
        model_decoder_layers: Full name of the list of decoder blocks; part of AMD Quark's public API, not
            used: the template has it.

    Raises:
        ConfigError: (a ValueError) ``desc_act`` without ``static_groups``.
        ValueError: A number is out of its range.
    """

    name: str = "gptq"
    damp_percent: float = attrs.field(default=of_preset(0.01), validator=[positive, validators.lt(1)])
    inside_layer_modules: list[str] = attrs.field(factory=list)
    model_decoder_layers: str = attrs.field(default="", metadata=UNUSED)

    def resolved(self) -> Self:
        """Return the settings with the preset's percdamp."""
        return attrs.evolve(self, damp_percent=given(self.damp_percent, BEST_DAMPING if self.preset == "best" else None))


@with_positional("name", "block_size", "damp_percent", "alpha", "desc_act", "static_groups", "inside_layer_modules", "model_decoder_layers")
@with_dataclass_view
@attrs.define(kw_only=True)
class GPTAQConfig(GPTQConfig):
    """GPTAQ: GPTQ that also compensates the error of the quantized inputs (arXiv 2504.02692).

    The preset ``"reference"`` corrects each column while columns are rounded, as published; ``"best"``
    corrects all columns before any is rounded, with at most the strength that reduces the error on held-out
    tokens.

    Attributes:
        alpha: Strength of the correction: 0 is GPTQ, 1 is the full correction.
    """

    name: str = "gptaq"
    alpha: Annotated[float, OptionNote(beside={"preset": "reference"})] = 0.25


@with_positional("inside_layer_modules", "model_decoder_layers", "name", "block_size", "desc_act", "static_groups", "alpha", "beta")
@with_dataclass_view
@attrs.define(kw_only=True)
class QronosConfig(_HessianConfig):
    """Qronos: corrects for quantized inputs and weights together, then rounds as GPTQ (arXiv 2505.11695).

    Attributes:
        inside_layer_modules: Names of the linear layers, relative to a decoder block.
        model_decoder_layers: Full name of the list of decoder blocks; as in `GPTQConfig`.
        alpha: Damping: this times the largest eigenvalue of the Hessian is added to its diagonal; above 0. By
            default, the preset ``"best"`` adds 0.05 times the mean diagonal instead, and configurations store
            None.
        beta: Part of AMD Quark's public API, not used: it scales the inverse Hessian, which this
            implementation does not compute.
        correction_share: Strength of the correction for quantized inputs, 0 to 1; None for the preset's
            value.
    """

    name: str = "qronos"
    inside_layer_modules: list[str]
    model_decoder_layers: str = attrs.field(metadata=UNUSED)
    alpha: float | None = attrs.field(default=cast("float | None", of_preset(_ALPHA)), validator=validators.optional(positive))
    beta: float = attrs.field(default=1e4, validator=positive, metadata=UNUSED)
    correction_share: float | None = attrs.field(
        default=None, validator=validators.optional([validators.ge(0), validators.le(1)]), metadata=OWN
    )

    def resolved(self) -> Self:
        """Return the settings with the actual damping; ``alpha`` is None if the preset's percdamp applies."""
        is_of_preset = self.alpha is None or not is_given(self.alpha)
        alpha = None if is_of_preset and self.preset == "best" else float(_ALPHA if self.alpha is None else self.alpha)
        return attrs.evolve(self, alpha=alpha)


@attrs.frozen(kw_only=True)
class Recipe:
    """All parameters of the rounding of columns.

    Attributes:
        block: Columns between two updates of the remaining matrix.
        act_order: Whether columns are rounded by descending diagonal of H.
        static_groups: Whether all scales are computed before any column is rounded. Otherwise, each group's
            scale is computed when its first column is reached.
        percdamp: λ as a share of H's mean diagonal; None to derive it from ``eigen_damping``.
        eigen_damping: λ as a share of H's largest eigenvalue; used if ``percdamp`` is None.
        scales: How scales are found: ``"minmax"``, ``"mse"`` or ``"hessian"``.
        share: Strength of the correction for quantized inputs, 0 to 1.
        is_causal: Whether the correction is GPTAQ's, column by column; else all columns are corrected before
            any is rounded.
        is_careful: Whether to shrink H if tokens are few, and to limit the correction to the strength that
            reduces the held-out error.
        float64: Whether H is accumulated and factored in float64.
        modules: Patterns of the layers, relative to a block; empty for all.
        vector: Number of columns that the format rounds together.
    """

    block: int
    act_order: bool
    static_groups: bool
    percdamp: float | None
    eigen_damping: float = 0.0
    scales: str
    share: float = 0.0
    is_causal: bool = False
    is_careful: bool
    float64: bool
    modules: tuple[str, ...]
    vector: int = 1


BEST_SHARE = 0.5
BEST_DAMPING = 0.05
"""Strength of the correction and percdamp of the preset "best", unless settings give them.

Chosen by `benchmarks.defaults`.
"""


def recipe_of(settings: GPTQConfig | QronosConfig) -> Recipe:
    """Return the recipe of the settings of any of the three algorithms."""
    best = settings.preset == "best"
    settings = settings.resolved()
    own: dict[str, Any] = {}
    if isinstance(settings, QronosConfig):
        own = {"percdamp": BEST_DAMPING} if settings.alpha is None else {"percdamp": None, "eigen_damping": settings.alpha}
        own["share"] = (BEST_SHARE if best else 1.0) if settings.correction_share is None else settings.correction_share
    else:
        own["percdamp"] = settings.damp_percent
    if isinstance(settings, GPTAQConfig):
        own |= {"share": settings.alpha, "is_causal": not best}
    return Recipe(
        block=settings.block_size,
        act_order=settings.desc_act,
        static_groups=settings.static_groups,
        scales=settings.scale_search or ("hessian" if best else "minmax"),
        is_careful=best,
        float64=settings.float64,
        modules=tuple(settings.inside_layer_modules),
        **own,
    )


def is_named_by(pattern: str, layer: str) -> bool:
    """Return whether a pattern of the settings matches a layer's name, relative to its block."""
    return fnmatchcase(layer, pattern) or layer.endswith(f".{pattern}")
