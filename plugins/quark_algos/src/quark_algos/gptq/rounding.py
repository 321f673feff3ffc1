"""Column rounding: GPTQ, GPTAQ and Qronos as recipes of one rounding, connected to the runs of `quark`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.algorithms import CrossMoment, Hessian, Hessian64, Metrics, OutputMoment, Rounding, RoundingTask
from quark.base.names import folded
from quark.base.parallel import beside, coarsely
from quark.base.scalars import numbers
from quark.config.algorithm import AlgoConfig
from quark.errors import NonFiniteError
from quark.numbers import GroupScales, WeightGrid
from quark_algos.gptq.config import GPTQConfig, QronosConfig, Recipe, recipe_of
from quark_algos.gptq.correction import ErrorMoment, causal_matrix, correction, share_for, solved
from quark_algos.gptq.damping import NONE, Factor, SingularError, damped_diagonal, factor, largest_eigenvalue
from quark_algos.gptq.ldlq import ldlq_by_rows, ldlq_choosing
from quark_algos.scale_search import COARSE, TO_A_QUARTER, search

__all__ = ["ColumnRounding"]


def _names(pattern: str, layer: str) -> bool:
    """Return whether a pattern of the settings matches a layer's full name."""
    return fnmatchcase(layer, pattern) or layer.endswith(f".{pattern}")


class ColumnRounding(Rounding):
    """Rounds the columns of a weight one after another.

    Each error is compensated in the remaining columns, weighted by the Hessian H.

    Metrics of every layer: ``damping`` (percdamp after all attempts), ``shrinkage`` (the factor by which
    entries of H off its diagonal were reduced, 0 to 1), ``attempts`` at factoring H, ``dead`` (number of
    input channels that are always 0), ``output_mse`` (expected mean squared error of an output element),
    ``few_tokens`` (whether there were fewer tokens than input channels); and ``correction_share``, if there
    is a correction.

    Args:
        settings: A `GPTQConfig`, `GPTAQConfig` or `QronosConfig`.
    """

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, GPTQConfig | QronosConfig)
        self._recipe = recipe_of(settings)
        self._hessian = Hessian64 if self._recipe.float64 else Hessian
        moment = CrossMoment if self._recipe.is_causal else ErrorMoment
        self.needs = (self._hessian, moment) if self._recipe.share else (self._hessian,)

    def applies_to(self, name: str) -> bool:
        """Return whether the settings name this layer."""
        patterns = self._recipe.modules
        return not patterns or any(_names(p, name) for p in patterns)

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """As `quark.algorithms.Rounding.unmatched`."""
        return [p for p in self._recipe.modules if not any(_names(p, name) for name in names)]

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round the columns of the layers' stacked weight.

        Return the metrics that the class lists, by layer.
        """
        hessian = task.statistic(self._hessian)
        largest = max(hessian.columns**2, sum(p.numel() for layer in task.layers.values() for p in layer.parameters()))
        with _saying_whose(task), coarsely(largest, hessian.device):
            solver = hessian.derived(_prepared, self._fitting(hessian))
            weights = task.stacked()
            weights.wt, causal, share = _corrected(weights.wt, task, hessian, solver)
            few_tokens = hessian.tokens < hessian.columns
            if not few_tokens:  # with few tokens, a channel that was always 0 may have inputs in others
                weights.wt[solver.dead] = 0
            grid = weights.grid()
            moments = solver.moments(hessian.matrix(), grid.group)
            rounded_rows = partial(_rounded_rows, wt=weights.wt, moments=moments, grid=grid, prepared=solver, causal=causal)
            rows = weights.wt.shape[1]
            # Rows are independent given the factor, unless scales span them.
            parts = task.by_rows(rounded_rows, rows) if grid.fixed is None else [rounded_rows(slice(0, rows))]
            q, loss, scales = zip(*parts, strict=True)
            weights.keep(grid, torch.cat(q, 1), GroupScales.beside(scales))
            metrics = solver.metrics | {"few_tokens": few_tokens} | ({} if share is None else {"correction_share": share})
            losses = weights.by_layer(torch.cat(loss))
            dead, *means = numbers(solver.dead.sum(), *(loss.mean() for loss in losses.values()))
            tokens = max(hessian.tokens, 1)
            return {name: metrics | {"dead": int(dead), "output_mse": mean / tokens} for name, mean in zip(losses, means, strict=True)}

    def _fitting(self, hessian: Hessian) -> Recipe:
        """Return the recipe for this Hessian.

        Damping by the largest eigenvalue is converted to percdamp.
        """
        recipe = self._recipe
        if recipe.percdamp is not None:
            return recipe
        h = hessian.matrix()
        mean = max(float(h.diagonal().mean()), torch.finfo(h.dtype).tiny)
        return attrs.evolve(recipe, percdamp=recipe.eigen_damping * largest_eigenvalue(h) / mean)


@attrs.frozen(eq=False)
class _Prepared:
    """The factor of a Hessian, its permutation, and other values that depend on no weight.

    Attributes:
        recipe: The recipe.
        perm: act_order as a permutation of the input channels, ``[K]``; None without act_order.
        perm_on_host: The same as a list.
        factored: Returns `factor`, which is computed beside the search of scales.
        dead: Mask of the input channels that are always 0, ``[K]``, not permuted.
        shrinkage: Result of `Hessian.shrinkage`; `NONE` if the recipe does not shrink H.
    """

    recipe: Recipe
    perm: Tensor | None
    perm_on_host: list[int] | None
    factored: Callable[[], Factor]
    dead: Tensor
    shrinkage: tuple[float, float]

    @property
    def factor(self) -> Factor:
        """Factor of the damped H, channels in the order ``perm``; float32."""
        return self.factored()

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics that all layers with this Hessian share, but for ``dead``, which is on the device."""
        return {"damping": self.factor.damping, "shrinkage": self.shrinkage[0], "attempts": self.factor.attempts}

    def moments(self, h: Tensor, group: int) -> Tensor | None:
        """Return the diagonal of ``h [m · group, m · group]``, damped and shrunk, ``[m, group]``, float32.

        None if the recipe does not search scales by it.
        """
        if self.recipe.scales != "hessian":
            return None
        assert self.recipe.percdamp is not None
        return damped_diagonal(h.diagonal(), self.recipe.percdamp, self.shrinkage).float().view(-1, group)


def _prepared(hessian: Hessian, recipe: Recipe) -> _Prepared:
    """Return the permutation of H, with its factor begun.

    Layers with the same input but other formats share them (`Hessian.derived`).
    """
    assert recipe.percdamp is not None
    h, damping = hessian.matrix(), recipe.percdamp
    shrinkage = hessian.shrinkage() if recipe.is_careful else NONE
    perm = torch.argsort(h.diagonal(), descending=True, stable=True) if recipe.act_order and recipe.static_groups else None
    factored = beside(lambda: factor(h, damping, perm, shrinkage).to(torch.float32), h.device)
    return _Prepared(recipe, perm, None if perm is None else perm.tolist(), factored, h.diagonal() <= 0, shrinkage)


def _corrected(wt: Tensor, task: RoundingTask, hessian: Hessian, prepared: _Prepared) -> tuple[Tensor, Tensor | None, float | None]:
    """Return the corrected weight, the causal matrix, and the strength of the correction.

    The causal matrix is GPTAQ's P, if the correction is causal.
    """
    recipe = prepared.recipe
    if not recipe.share:
        return wt, None, None
    if recipe.is_causal:
        d = task.statistic(CrossMoment).matrix()
        if prepared.perm is not None:
            d = d.index_select(0, prepared.perm).index_select(1, prepared.perm)
        return wt, causal_matrix(d, prepared.factor, recipe.share), recipe.share
    if OutputMoment in task.statistics:  # W (D + H), so that W D is what it has beyond W H
        of_errors = torch.addmm(task.statistic(OutputMoment).matrix().t(), hessian.matrix(), wt, beta=1, alpha=-1)
        step = solved(of_errors, prepared.factor, prepared.perm)
    else:
        step = correction(wt, task.statistic(ErrorMoment).matrix(), prepared.factor, prepared.perm)
    share, held_out = recipe.share, task.held_out
    if recipe.is_careful and held_out is not None and (held_out.reference is not None or held_out.float_outputs is not None):
        share = share_for(wt, step, held_out, share)
    elif recipe.is_careful and hessian.tokens < wt.shape[0]:
        share = 0.0  # without held-out tokens and with few others, nothing shows that the correction helps
    return wt.add_(step, alpha=share), None, share


@contextmanager
def _saying_whose(task: RoundingTask) -> Iterator[None]:
    """Name the layers in an error about their Hessian."""
    try:
        yield
    except SingularError as error:
        raise SingularError(f"{folded(task.layers)}: {error}") from error
    except NonFiniteError as error:
        raise NonFiniteError(f"{folded(task.layers)}: {error}", tensor=next(iter(task.layers))) from error


def _rounded_rows(
    rows: slice, wt: Tensor, moments: Tensor | None, grid: WeightGrid, prepared: _Prepared, causal: Tensor | None
) -> tuple[Tensor, Tensor, GroupScales]:
    """Return some rows of the weight, rounded; their losses; and the scales of their groups."""
    wt, grid, recipe = wt[:, rows].contiguous(), grid.of_rows(rows), prepared.recipe
    if recipe.static_groups or grid.fixed is not None or grid.group == grid.columns:
        scales = _scales(wt, moments, grid, recipe)
        each = grid.with_subscales(wt, scales)
        swept = ldlq_by_rows(wt, prepared.factor, grid, each, recipe.block, prepared.perm, causal, prepared.perm_on_host)
    else:

        def choose(t: Tensor, number: int) -> GroupScales:
            return _scales(t, None if moments is None else moments[number : number + 1], grid, recipe)

        swept, scales = ldlq_choosing(wt, prepared.factor, grid, choose, causal)
    return swept.q, swept.loss, scales


def _scales(wt: Tensor, moments: Tensor | None, grid: WeightGrid, recipe: Recipe) -> GroupScales:
    """Return the scales of the groups of ``wt [m · group, N]``; ``moments`` as of `search`."""
    if recipe.scales == "minmax":
        return grid.fixed or grid.scales(wt)
    if grid.fixed is not None and moments is None:
        return grid.fixed  # one scale for many rows, by plain squared errors, clips the weights of the channels that matter most
    return search(wt, grid, moments, COARSE if moments is None else TO_A_QUARTER)
