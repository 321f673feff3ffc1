"""Recipes: the settings of GPTQ, GPTAQ and Qronos as one set of parameters, presets resolved."""

from __future__ import annotations

import attrs

from quark_algos.gptq.config import GPTAQConfig, GPTQConfig, QronosConfig

__all__ = ["BEST_CORRECTION_DAMPING", "BEST_DAMPING", "BEST_SHARE", "Recipe", "recipe_of"]


@attrs.frozen(kw_only=True)
class Recipe:
    """All parameters of the rounding of columns.

    Attributes:
        block: Columns between two updates of the remaining matrix.
        act_order: Whether columns are rounded by descending diagonal of H.
        static_groups: Whether all scales are computed before any column is rounded; else a group's when its
            first column is reached.
        percdamp: λ as a share of H's mean diagonal; None to derive it from ``eigen_damping``.
        eigen_damping: λ as a share of H's largest eigenvalue; used if ``percdamp`` is None.
        scales: How scales are found: ``"minmax"``, ``"mse"`` or ``"hessian"``.
        refits: How often scales are fitted to the codes and the weight is rounded again.
        passes: Sweeps of coordinate descent.
        share: Strength of the correction for quantized inputs, 0 to 1.
        correction_percdamp: percdamp of H in the correction; None for ``percdamp``.
        is_causal: Whether the correction is GPTAQ's, column by column; else all columns are corrected before
            any is rounded.
        is_careful: Whether H is shrunk where tokens are few, and the correction limited to what reduces the
            error on held-out tokens.
        float64: Whether H is accumulated and factored in float64.
        modules: Patterns of the layers, relative to a block; empty for all.
    """

    block: int
    act_order: bool
    static_groups: bool
    percdamp: float | None
    eigen_damping: float = 0.0
    scales: str
    refits: int
    passes: int
    share: float = 0.0
    correction_percdamp: float | None = None
    is_causal: bool = False
    is_careful: bool
    float64: bool
    modules: tuple[str, ...]


BEST_SHARE = 0.5
BEST_CORRECTION_DAMPING = 0.1
BEST_DAMPING = 0.05
"""Strength and percdamp of the correction and the smallest percdamp of the preset "best", chosen by held-out perplexity: see
`benchmarks.calibrated`."""


def recipe_of(settings: GPTQConfig | QronosConfig) -> Recipe:
    """Return the recipe of the settings of any of the three algorithms."""
    best = settings.preset == "best"
    common = Recipe(
        block=settings.block_size,
        act_order=settings.desc_act,
        static_groups=settings.static_groups,
        percdamp=_percdamp(settings, best),
        scales=settings.scale_search or ("hessian" if best else "minmax"),
        refits=settings.scale_refits or 0,
        passes=settings.descent_passes or 0,
        is_careful=best,
        float64=settings.float64,
        modules=tuple(settings.inside_layer_modules),
    )
    if isinstance(settings, QronosConfig):
        return _qronos(settings, common, best)
    return _gptaq(settings, common, best) if isinstance(settings, GPTAQConfig) else common


def _percdamp(settings: GPTQConfig | QronosConfig, best: bool) -> float | None:
    if isinstance(settings, GPTQConfig):
        return max(settings.damp_percent, BEST_DAMPING) if best else settings.damp_percent
    return BEST_DAMPING if best else None


def _gptaq(settings: GPTAQConfig, common: Recipe, best: bool) -> Recipe:
    return attrs.evolve(
        common,
        share=settings.alpha,
        is_causal=not best,
        correction_percdamp=settings.correction_damping or (BEST_CORRECTION_DAMPING if best else None),
    )


def _qronos(settings: QronosConfig, common: Recipe, best: bool) -> Recipe:
    share = settings.correction_share
    return attrs.evolve(
        common,
        eigen_damping=settings.alpha,
        share=share if share is not None else (BEST_SHARE if best else 1.0),
        correction_percdamp=settings.correction_damping or (BEST_CORRECTION_DAMPING if best else None),
    )
