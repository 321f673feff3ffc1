"""Settings of GPTQ, GPTAQ and Qronos. These algorithms use the Hessian of a layer's input to choose codes.

A `Recipe` has the same parameters for all three algorithms. It has final values: the preset is already
applied.
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
"""AMD Quark's damping for Qronos, as a share of the largest eigenvalue of H."""


@with_dataclass_view
@attrs.define(kw_only=True)
class _HessianConfig(AlgoConfig):
    """Base class of the three configurations.

    Attributes:
        block_size: Number of columns between two updates of the remaining columns. It changes the speed;
            results differ only by rounding errors.
        desc_act: Whether columns are rounded in the order of descending diagonal entries of the Hessian
            (act_order).
        static_groups: Whether the scales of all groups are computed before the first column is rounded. It
            must be True if ``desc_act`` is True.
        preset: ``"reference"`` is the published algorithm with AMD Quark's defaults. ``"best"`` also searches
            the scales with the smallest output error, shrinks the Hessian, and uses percdamp 0.05. Settings
            that you give override the preset.
        scale_search: How the scales of groups are chosen. ``"minmax"`` uses the range of the weights,
            ``"mse"`` minimizes the error of the weights, and ``"hessian"`` minimizes the error of the
            outputs. If it is None, the preset decides.
        float64: Whether the Hessian is accumulated and factored in float64. This is slower; results differ
            only by rounding errors.
        true_sequential: A field of configurations from versions before 0.12. It is ignored, because
            calibration is always sequential.
        embedding_layers: A field of configurations from versions before 0.6. It is ignored.
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
                f"{type(self).__name__}: desc_act=True with static_groups=False would spread each group over the matrix. Set "
                f"static_groups=True, or desc_act=False"
            )

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> Self | None:
        """Return settings that name all projections of a decoder block, in the order in which data flows.

        An architecture whose facts were inferred may name no projections. Then the list of layers in the
        settings is empty, which means that all linear layers of the blocks are rounded. Return None if the
        decoder blocks are not known.
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
        """Return why the algorithm cannot be used with an architecture, or None if it can be used.

        The reason is that the decoder blocks are not known.
        """
        return None if architecture.decoder_blocks else "its template names no decoder blocks"


@with_positional("name", "block_size", "damp_percent", "desc_act", "static_groups", "inside_layer_modules", "model_decoder_layers")
@with_dataclass_view
@attrs.define(kw_only=True)
class GPTQConfig(_HessianConfig):
    """Settings of GPTQ (arXiv 2210.17323).

    GPTQ rounds columns one after another, and compensates the error of each column in the remaining columns.

    The base class has further settings.

    Attributes:
        damp_percent: Damping (percdamp). This share of the mean of the Hessian's diagonal is added to the
            diagonal. It must be above 0 and below 1. If you do not give it, the preset ``"best"`` uses 0.05.
        inside_layer_modules: Names of the linear layers to round, relative to a decoder block. ``*`` matches
            any characters. If the list is empty, all linear layers are rounded.
        model_decoder_layers: Full name of the list of decoder blocks. It belongs to AMD Quark's public API
            and is not used, because the name comes from the template.

    Raises:
        ConfigError: (a ValueError) ``desc_act`` is True, but ``static_groups`` is False.
        ValueError: A number is outside its range.
    """

    name: str = "gptq"
    damp_percent: float = attrs.field(default=of_preset(0.01), validator=[positive, validators.lt(1)])
    inside_layer_modules: list[str] = attrs.field(factory=list)
    model_decoder_layers: str = attrs.field(default="", metadata=UNUSED)

    def resolved(self) -> Self:
        """Return a copy of the settings in which ``damp_percent`` has the preset's value, unless the user has
        given ``damp_percent``.
        """
        return attrs.evolve(self, damp_percent=given(self.damp_percent, BEST_DAMPING if self.preset == "best" else None))


@with_positional("name", "block_size", "damp_percent", "alpha", "desc_act", "static_groups", "inside_layer_modules", "model_decoder_layers")
@with_dataclass_view
@attrs.define(kw_only=True)
class GPTAQConfig(GPTQConfig):
    """Settings of GPTAQ (arXiv 2504.02692). GPTAQ is GPTQ with a correction for the error of quantized
    inputs.

    With the preset ``"reference"``, each column is corrected just before it is rounded, as in the paper. With
    ``"best"``, all columns are corrected before any column is rounded, and the strength of the correction is
    limited to a value that reduces the error on held-out tokens.

    Attributes:
        alpha: Strength of the correction. 0 means GPTQ, and 1 means the full correction.
    """

    name: str = "gptaq"
    alpha: Annotated[float, OptionNote(beside={"preset": "reference"})] = 0.25


@with_positional("inside_layer_modules", "model_decoder_layers", "name", "block_size", "desc_act", "static_groups", "alpha", "beta")
@with_dataclass_view
@attrs.define(kw_only=True)
class QronosConfig(_HessianConfig):
    """Settings of Qronos (arXiv 2505.11695).

    Qronos first corrects a weight for the error of the layer's quantized inputs. Then it rounds the weight in
    the same way as GPTQ.

    Attributes:
        inside_layer_modules: As in `GPTQConfig`.
        model_decoder_layers: As in `GPTQConfig`.
        alpha: Damping. This share of the Hessian's largest eigenvalue is added to the diagonal of the
            Hessian. It must be above 0. If you do not give it, the preset ``"best"`` instead adds 0.05 times
            the mean of the diagonal. The stored configuration then has None here.
        beta: A field of AMD Quark's public API. It is not used: in AMD Quark, it scales the inverse Hessian,
            and this implementation computes no inverse Hessian.
        correction_share: Strength of the correction for quantized inputs, from 0 to 1. If it is None, the
            preset decides.
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
        """Return a copy of the settings with the damping that is used.

        In the copy, ``alpha`` is None if the preset's damping, a share of the mean of the diagonal, is used.
        """
        is_of_preset = self.alpha is None or not is_given(self.alpha)
        alpha = None if is_of_preset and self.preset == "best" else float(_ALPHA if self.alpha is None else self.alpha)
        return attrs.evolve(self, alpha=alpha)


@attrs.frozen(kw_only=True)
class Recipe:
    """All parameters of an algorithm that rounds columns.

    Attributes:
        block: Number of columns between two updates of the remaining columns.
        act_order: Whether columns are rounded in the order of descending diagonal entries of H.
        static_groups: Whether all scales are computed before the first column is rounded. If it is False, the
            scales of a group are computed just before the first column of the group is rounded.
        percdamp: The damping λ as a share of the mean of H's diagonal. It is None if λ is computed from
            ``eigen_damping``.
        eigen_damping: The damping λ as a share of H's largest eigenvalue. It is used only if ``percdamp`` is
            None.
        scales: How scales are chosen: ``"minmax"``, ``"mse"`` or ``"hessian"``.
        share: Strength of the correction for quantized inputs, from 0 to 1.
        is_causal: Whether each column is corrected just before it is rounded, as in GPTAQ. If it is False,
            all columns are corrected before the first column is rounded.
        is_careful: Whether H is shrunk to reduce sampling noise, and whether the strength of the correction
            is limited to a value that reduces the error on held-out tokens.
        float64: Whether H is accumulated and factored in float64.
        modules: Patterns for the names of the layers to round, relative to a block. If it is empty, all
            linear layers are rounded.
        vector: Number of columns that the number format encodes together.
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
"""The strength of the correction and the percdamp of the preset "best", if the user gives no other values.

They were chosen with `benchmarks.defaults`.
"""


def recipe_of(settings: GPTQConfig | QronosConfig) -> Recipe:
    """Return the recipe for the settings of one of the three algorithms."""
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
    """Return whether a pattern of the settings matches the name ``layer``. Names are relative to the block of
    the layer.
    """
    return fnmatchcase(layer, pattern) or layer.endswith(f".{pattern}")
