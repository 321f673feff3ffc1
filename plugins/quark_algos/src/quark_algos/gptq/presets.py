"""Recipes: the settings of GPTQ, GPTAQ and Qronos as one set of parameters, presets resolved."""

from __future__ import annotations

import attrs

from quark_algos.gptq.config import GPTAQConfig, GPTQConfig, QronosConfig

__all__ = ["BEST_CORRECTION_DAMPING", "BEST_DAMPING", "BEST_SHARE", "Recipe", "recipe_of"]


@attrs.frozen(kw_only=True)
class Recipe:
    """How the columns of a weight are rounded.

    Attributes:
        block: Columns between two products with all that went before.
        act_order: Columns by descending diagonal of H, or in their own order.
        static_groups: Scales before any column is rounded, or each group's when its first column is reached.
        damping: Share of H's mean diagonal, or where that is None, ``eigen_damping`` of H's largest eigenvalue.
        eigen_damping: See there.
        scales: How scales are found: ``"minmax"``, ``"mse"`` or ``"hessian"``.
        refits: How often scales are fitted to the codes there are, and the weight rounded anew.
        passes: Sweeps of coordinate descent.
        share: Of the correction for quantized inputs.
        correction_damping: Share of H's mean diagonal that holds that correction back; None for the damping itself.
        is_causal: Whether that correction is GPTAQ's own, along the way, in place of all of it before any column is rounded.
        is_careful: Whether H loses what is likely to be chance, and the correction what does no good on held-out tokens.
        float64: Whether H is summed and factored in float64.
        modules: Patterns of the layers, relative to a block; empty for all.
    """

    block: int
    act_order: bool
    static_groups: bool
    damping: float | None
    eigen_damping: float = 0.0
    scales: str
    refits: int
    passes: int
    share: float = 0.0
    correction_damping: float | None = None
    is_causal: bool = False
    is_careful: bool
    float64: bool
    modules: tuple[str, ...]


BEST_SHARE = 0.5
BEST_CORRECTION_DAMPING = 0.1
BEST_DAMPING = 0.05
"""The correction and the smallest damping of the preset "best", chosen by held-out perplexity: see `benchmarks.calibrated`."""


def recipe_of(settings: GPTQConfig | QronosConfig) -> Recipe:
    """Return the recipe of the settings of any of the three algorithms."""
    best = settings.preset == "best"
    common = Recipe(
        block=settings.block_size,
        act_order=settings.desc_act,
        static_groups=settings.static_groups,
        damping=_damping(settings, best),
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


def _damping(settings: GPTQConfig | QronosConfig, best: bool) -> float | None:
    if isinstance(settings, GPTQConfig):
        return max(settings.damp_percent, BEST_DAMPING) if best else settings.damp_percent
    return BEST_DAMPING if best else None


def _gptaq(settings: GPTAQConfig, common: Recipe, best: bool) -> Recipe:
    return attrs.evolve(
        common,
        share=settings.alpha,
        is_causal=not best,
        correction_damping=settings.correction_damping or (BEST_CORRECTION_DAMPING if best else None),
    )


def _qronos(settings: QronosConfig, common: Recipe, best: bool) -> Recipe:
    share = settings.correction_share
    return attrs.evolve(
        common,
        eigen_damping=settings.alpha,
        share=share if share is not None else (BEST_SHARE if best else 1.0),
        correction_damping=settings.correction_damping or (BEST_CORRECTION_DAMPING if best else None),
    )
