"""Column by column: the rounding that GPTQ, GPTAQ and Qronos are recipes of. Plumbing between the pipeline and `quark_algos.gptq`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.algorithms import CrossMoment, Hessian, Hessian64, Metrics, RoundingTask, Statistic
from quark.config.algorithm import AlgoConfig
from quark.errors import NonFiniteError
from quark.names import folded
from quark.quantizers import GroupScales, WeightGrid
from quark_algos.gptq.config import GPTQConfig, QronosConfig
from quark_algos.gptq.correction import causal_matrix, correction, share_for
from quark_algos.gptq.damping import NONE, Factor, SingularError, damped, factor, largest_eigenvalue
from quark_algos.gptq.ldlq import Swept, descend, ldlq_by_rows, ldlq_choosing
from quark_algos.gptq.presets import Recipe, recipe_of
from quark_algos.gptq.scale_refit import refit
from quark_algos.scale_search import search

__all__ = ["ColumnRounding"]


def _names(pattern: str, layer: str) -> bool:
    return fnmatchcase(layer, pattern) or layer.endswith(f".{pattern}")


class ColumnRounding:
    """Rounds the columns of a weight one after another, in view of the outputs.

    Metrics of every layer: ``damping`` (share of H's mean diagonal), ``shrinkage`` (the share of H off its diagonal that is likely to be
    chance, and was taken from it), ``attempts`` at factoring H, ``dead`` channels, ``output_mse``, the mean squared error of an output
    element that the algorithm expects, ``few_tokens``, whether there were fewer than input channels; and ``correction_share``, where
    there is a correction.

    Args:
        settings: A `GPTQConfig`, `GPTAQConfig` or `QronosConfig`.
    """

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, GPTQConfig | QronosConfig)
        self._recipe = recipe_of(settings)
        self._hessian = Hessian64 if self._recipe.float64 else Hessian
        self.needs: Sequence[type[Statistic]] = (self._hessian, CrossMoment) if self._recipe.share else (self._hessian,)

    def applies_to(self, name: str) -> bool:
        """Whether the settings name this layer."""
        patterns = self._recipe.modules
        return not patterns or any(_names(p, name) for p in patterns)

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """As `quark.algorithms.NamesLayers.unmatched`."""
        return [p for p in self._recipe.modules if not any(_names(p, name) for name in names)]

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round the columns of the layers' stacked weight; metrics as the class says."""
        hessian = task.statistic(self._hessian)
        try:
            solver = _ready(hessian, self._fitting(hessian))
        except SingularError as error:
            raise SingularError(f"{folded(task.layers)}: {error}") from error
        except NonFiniteError as error:
            raise NonFiniteError(f"{folded(task.layers)}: {error}", tensor=next(iter(task.layers))) from error
        weights = task.stacked()
        weights.wt, causal, share = _corrected(weights.wt, task, hessian, solver)
        few_tokens = hessian.tokens < hessian.columns
        if not few_tokens:  # of a few tokens, a channel without input says little about others
            weights.wt[solver.dead] = 0
        grid = weights.grid()
        swept, scales = _rounded(weights.wt, hessian.matrix(), grid, solver, causal)
        weights.keep(grid, swept.q, scales)
        metrics = solver.metrics | {"few_tokens": few_tokens} | ({} if share is None else {"correction_share": share})
        losses = weights.by_layer(swept.loss)
        return {name: metrics | {"output_mse": float(loss.mean()) / max(hessian.tokens, 1)} for name, loss in losses.items()}

    def _fitting(self, hessian: Hessian) -> Recipe:
        """The recipe for a layer of such inputs, its damping a share of the mean diagonal."""
        recipe = self._recipe
        if recipe.damping is not None:
            return recipe
        h = hessian.matrix()
        mean = max(float(h.diagonal().mean()), torch.finfo(h.dtype).tiny)
        return attrs.evolve(recipe, damping=recipe.eigen_damping * largest_eigenvalue(h) / mean)


@attrs.frozen(eq=False)
class _Ready:
    """What can be made of a Hessian before any weight is looked at.

    Attributes:
        recipe: It was made by.
        order: Of the channels, ``[K]``, or None for their own.
        factor: In that order; float32.
        dead: Channels that are always 0, in their own order.
        shrinkage: As `Hessian.shrinkage` has it; none where the recipe takes H as it was measured.
    """

    recipe: Recipe
    order: Tensor | None
    factor: Factor
    dead: Tensor
    shrinkage: tuple[float, float]

    @property
    def metrics(self) -> dict[str, Any]:
        """What is to be reported."""
        found = self.factor.damped
        return {
            "damping": found.damping,
            "shrinkage": self.shrinkage[0],
            "attempts": found.attempts,
            "dead": int(self.dead.sum()),
        }


def _ready(hessian: Hessian, recipe: Recipe) -> _Ready:
    """The factor of H; layers that share their input but not their format find it made."""
    key = ("ready", recipe)
    if key not in hessian.derived:
        assert recipe.damping is not None
        h = hessian.matrix()
        shrinkage = hessian.shrinkage() if recipe.is_careful else NONE
        order = torch.argsort(h.diagonal(), descending=True, stable=True) if recipe.act_order and recipe.static_groups else None
        found = factor(h, recipe.damping, order, shrinkage).to(torch.float32)
        hessian.derived[key] = _Ready(recipe, order, found, h.diagonal() <= 0, shrinkage)
    ready: _Ready = hessian.derived[key]
    return ready


def _corrected(wt: Tensor, task: RoundingTask, hessian: Hessian, ready: _Ready) -> tuple[Tensor, Tensor | None, float | None]:
    """The weight that makes up for the error of its inputs; or the matrix by which that is done along the way; and the share that is."""
    recipe = ready.recipe
    if not recipe.share or CrossMoment not in task.statistics:
        return wt, None, None
    d = task.statistic(CrossMoment).matrix()
    if recipe.is_causal:
        if ready.order is not None:
            d = d.index_select(0, ready.order).index_select(1, ready.order)
        return wt, causal_matrix(d, ready.factor, recipe.share), recipe.share
    step = correction(wt, d, _correction_factor(hessian, ready))
    share, held_out = recipe.share, task.held_out
    if recipe.is_careful and held_out is not None and held_out.reference is not None:
        share = share_for(wt, step, held_out.x.float(), held_out.reference.float(), share)
    elif recipe.is_careful and hessian.tokens < wt.shape[0]:
        share = 0.0  # nothing says that it would do good
    return wt.add_(step, alpha=share), None, share


def _correction_factor(hessian: Hessian, ready: _Ready) -> Factor:
    damping = ready.recipe.correction_damping or ready.recipe.damping
    assert damping is not None
    key = ("correction", damping, ready.shrinkage)
    if key not in hessian.derived:
        hessian.derived[key] = factor(hessian.matrix(), damping, None, ready.shrinkage).to(torch.float32)
    found: Factor = hessian.derived[key]
    return found


def _rounded(wt: Tensor, h: Tensor, grid: WeightGrid, ready: _Ready, causal: Tensor | None) -> tuple[Swept, GroupScales]:
    """The rounded weight, and the scales of all groups."""
    recipe = ready.recipe
    # Under the same H as codes are chosen by: of a few tokens the plain sum says next to nothing of single groups.
    known = damped(h, ready.factor.damped.damping, ready.shrinkage).h.float() if recipe.scales == "hessian" else None
    if recipe.static_groups or grid.fixed is not None or grid.group == grid.columns:
        scales = _scales(wt, known, grid, recipe)
        each = grid.with_subscales(wt, scales)
        done = ldlq_by_rows(wt, ready.factor, grid, each, recipe.block, ready.order, causal)
        for _ in range(recipe.refits if grid.can_be_refitted else 0):
            done, scales = _refitted(h, grid, ready, done, scales)
        each = grid.with_subscales(wt, scales)
    else:

        def choose(t: Tensor, number: int) -> GroupScales:
            part = slice(number * grid.group, (number + 1) * grid.group)
            return _scales(t, None if known is None else known[part, part], grid, recipe)

        done, scales, each = ldlq_choosing(wt, ready.factor, grid, choose, causal)
    for _ in range(recipe.passes):
        if not descend(done, ready.factor.damped.h, grid.rounder(each, ready.order)):
            break
    return done, scales


def _refitted(h: Tensor, grid: WeightGrid, ready: _Ready, done: Swept, scales: GroupScales) -> tuple[Swept, GroupScales]:
    """Scales fitted to the codes, and the weight rounded anew under them; rows that gain nothing stay as they are."""
    recipe = ready.recipe
    assert recipe.damping is not None
    e = done.e_in_place()
    factors = refit(done.q, e, damped(h, recipe.damping, ready.shrinkage).h, grid.group)
    high = scales.scale * factors * grid.max_magnitude
    fitted = grid.scales_of_ranges(-high, high)
    again = ldlq_by_rows(done.q + e, ready.factor, grid, fitted, recipe.block, ready.order)
    better = again.loss < done.loss  # [N]
    return done.where(better, again), scales.where(better.expand_as(scales.scale), fitted)


def _scales(wt: Tensor, known: Tensor | None, grid: WeightGrid, recipe: Recipe) -> GroupScales:
    """Scales of the groups of ``wt [m · group, N]``, of whose channels ``known [m · group, m · group]`` is H, where that is wanted."""
    if recipe.scales == "minmax":
        return grid.fixed or grid.scales(wt)
    if grid.fixed is not None and known is None:
        return grid.fixed  # one scale for many rows, by plain squared errors, clips the weights of the channels that matter most
    return search(wt, grid, known)
