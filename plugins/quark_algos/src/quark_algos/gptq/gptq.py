"""GPTQ, GPTAQ and Qronos. They round a weight column by column, and compensate the errors of earlier columns.

`ColumnRounding` is the class of the rounding algorithm. It factors the Hessian (`quark_algos.gptq.damping`),
corrects the weight for the error of its inputs if the recipe says so (`quark_algos.gptq.correction`), chooses
scales, and rounds the columns with `ldlq`. In `ldlq`, column k is rounded from ``t_k = w_k + Σ_j e_j A_jk``.
w is the weight, A is the factor, and e_j is the error of column j. The sum is over all earlier columns j. For
the columns of earlier blocks, the sum is one matrix product. Inside a block, a smaller matrix product follows
every few columns, and each column needs a few operations on one row of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from operator import call
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.algorithms import CrossMoment, Hessian, Hessian64, Metrics, Rounding, RoundingTask, weight_quantizer
from quark.base.names import folded
from quark.base.parallel import beside, coarsely, one_thread, parallel_map, row_slices
from quark.base.scalars import numbers
from quark.config.algorithm import AlgoConfig
from quark.errors import NonFiniteError
from quark.numbers import ColumnRounder, GroupScales, WeightGrid
from quark.numbers.kernels import uses_kernels
from quark_algos.gptq.config import GPTQConfig, QronosConfig, Recipe, is_named_by, recipe_of
from quark_algos.gptq.correction import ErrorMoment, corrected
from quark_algos.gptq.damping import NONE, Factor, SingularError, damped_diagonal, factor, percdamp_of
from quark_algos.gptq.swept import Swept
from quark_algos.gptq.vectors import by_vectors, descending, round_vectors
from quark_algos.scale_search import COARSE, TO_A_QUARTER, search

__all__ = ["BLOCK", "FEW", "SLICE", "Chooser", "ColumnRounding", "Rounder", "Swept", "ldlq", "ldlq_by_rows", "ldlq_choosing"]

BLOCK = 128
"""Number of columns of a block. Each block needs one matrix product with all earlier columns."""
FEW = 16
"""Number of columns after which there is a product inside a block."""
SLICE = 4096
"""Number of rows of a weight per thread. With fewer rows, threads would mostly wait for Python's lock.
"""
WIDE = 4096
"""If a weight has more columns than this, a thread gets proportionally fewer rows, because products with
earlier blocks dominate.
"""

MOST_COLUMNS = 256
"""Maximum number of columns of a block for the kernel. With 8 rows, such a block needs 64 registers per
thread.
"""

Rounder = Callable[[Tensor, int, Tensor], Tensor]
"""A function that rounds a column, as returned by `WeightGrid.rounder`. Its arguments are the values
``t [N]``, the number of the column, and a tensor for the result, which is also returned.
"""
Chooser = Callable[[Tensor, int], GroupScales]


class ColumnRounding(Rounding):
    """Rounds the columns of a weight one after another, and compensates each error in the remaining columns.

    The Hessian H determines how an error is compensated. The metrics of a layer are ``damping`` (percdamp
    after all attempts), ``shrinkage`` (the share by which off-diagonal entries of H were reduced, from 0 to
    1), ``attempts`` (the number of attempts to factor H), ``dead`` (the number of input channels that are
    always 0), ``output_mse`` (the expected mean squared error of an output element), and ``few_tokens``
    (whether there were fewer tokens than input channels). If the weight was corrected, ``correction_share``
    is the strength of the correction.

    Args:
        settings: A `GPTQConfig`, `GPTAQConfig` or `QronosConfig`.
    """

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, GPTQConfig | QronosConfig)
        self._recipe = recipe_of(settings)
        self._hessian = Hessian64 if self._recipe.float64 else Hessian
        moment = CrossMoment if self._recipe.is_causal else ErrorMoment
        self.needs = (self._hessian, moment) if self._recipe.share else (self._hessian,)
        self.rounds_vectors = not self._recipe.is_causal  # GPTAQ corrects a column with earlier columns, which may be in the same vector

    def applies_to(self, name: str) -> bool:
        """Return whether the settings apply to the layer ``name``."""
        patterns = self._recipe.modules
        return not patterns or any(is_named_by(p, name) for p in patterns)

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """Return the patterns that match none of the names. See `quark.algorithms.Rounding.unmatched`."""
        return [p for p in self._recipe.modules if not any(is_named_by(p, name) for name in names)]

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round the columns of the stacked weight of a task's layers, and return metrics for each layer."""
        hessian = task.statistic(self._hessian)
        largest = max(hessian.columns**2, sum(p.numel() for layer in task.layers.values() for p in layer.parameters()))
        with _saying_whose(task), coarsely(largest, hessian.device):
            vector = weight_quantizer(next(iter(task.layers.values()))).quantizer.stored_level.format.vector
            solver = hessian.derived(_prepared, self._fitting(hessian, vector))
            weights = task.stacked()
            causal, share = None, None
            if self._recipe.share:
                weights.wt, causal, share = corrected(weights.wt, task, hessian, solver.recipe, solver.factor, solver.perm)
            few_tokens = hessian.tokens < hessian.columns
            if not few_tokens:  # with few tokens, a channel that was always 0 may be nonzero in other tokens
                weights.wt[solver.dead] = 0
            grid = weights.grid(hessian.matrix().diagonal())
            moments = solver.moments(hessian.matrix(), grid.group)
            rounded_rows = partial(_rounded_rows, wt=weights.wt, moments=moments, grid=grid, prepared=solver, causal=causal)
            rows = weights.wt.shape[1]
            # With a given factor, rows are independent of each other, unless scales span rows.
            parts = task.by_rows(rounded_rows, rows) if grid.fixed is None else [rounded_rows(slice(0, rows))]
            q, loss, scales = zip(*parts, strict=True)
            weights.keep(grid, torch.cat(q, 1), GroupScales.beside(scales))
            metrics = solver.metrics | {"few_tokens": few_tokens} | ({} if share is None else {"correction_share": share})
            losses = weights.by_layer(torch.cat(loss))
            dead, *means = numbers(solver.dead.sum(), *(loss.mean() for loss in losses.values()))
            tokens = max(hessian.tokens, 1)
            return {name: metrics | {"dead": int(dead), "output_mse": mean / tokens} for name, mean in zip(losses, means, strict=True)}

    def _fitting(self, hessian: Hessian, vector: int) -> Recipe:
        """Return the recipe for a Hessian and for a format that encodes ``vector`` columns together.

        A damping that is a share of the largest eigenvalue is converted to percdamp. The block size of the
        returned recipe is a multiple of ``vector``.
        """
        recipe = self._recipe
        recipe = attrs.evolve(recipe, vector=vector, block=max(vector, recipe.block // vector * vector))
        if recipe.percdamp is not None:
            return recipe
        return attrs.evolve(recipe, percdamp=percdamp_of(hessian.matrix(), recipe.eigen_damping))


@attrs.frozen(eq=False, slots=False)
class _Prepared:
    """The factor of a Hessian, the order of its channels, and other values that do not depend on a weight.

    Attributes:
        recipe: The recipe.
        perm: If the recipe uses act_order, the order of the input channels, as a permutation ``[K]``.
            Otherwise it is None.
        perm_on_host: The same permutation as a list.
        factored: A function that returns the factor. The factor is computed in another thread while the
            scales are searched.
        dead: A mask of the input channels that are always 0, ``[K]``, in the original order.
        shrinkage: The result of `Hessian.shrinkage`, or `NONE` if the recipe does not shrink H.
    """

    recipe: Recipe
    perm: Tensor | None
    perm_on_host: list[int] | None
    factored: Callable[[], Factor]
    dead: Tensor
    shrinkage: tuple[float, float]

    @property
    def factor(self) -> Factor:
        """The factor of the damped H in float32, with the channels in the order ``perm``."""
        return self.factored()

    @cached_property
    def factor_of_vectors(self) -> Factor:
        """The factor that compensates the errors of vectors of columns. If each column is rounded alone, it
        equals `factor`.
        """
        return by_vectors(self.factor, self.recipe.vector)

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics that all layers with this Hessian share. They do not include ``dead``, because its
        value is still on the device.
        """
        return {"damping": self.factor.damping, "shrinkage": self.shrinkage[0], "attempts": self.factor.attempts}

    def moments(self, h: Tensor, group: int) -> Tensor | None:
        """Return the diagonal of ``h`` after shrinking and damping, as a float32 tensor ``[m, group]``. ``h``
        is ``[m · group, m · group]``.

        Return None if the recipe does not use this diagonal to search scales.
        """
        if self.recipe.scales != "hessian":
            return None
        assert self.recipe.percdamp is not None
        return damped_diagonal(h.diagonal(), self.recipe.percdamp, self.shrinkage).float().view(-1, group)


def _prepared(hessian: Hessian, recipe: Recipe) -> _Prepared:
    """Return a `_Prepared` for a Hessian. The computation of the factor starts in another thread.

    Layers with the same input share the result, even if the layers use different formats (see
    `Hessian.derived`).
    """
    assert recipe.percdamp is not None
    h, damping = hessian.matrix(), recipe.percdamp
    shrinkage = hessian.shrinkage() if recipe.is_careful else NONE
    perm = descending(h.diagonal(), recipe.vector) if recipe.act_order and recipe.static_groups else None
    factored = beside(lambda: factor(h, damping, perm, shrinkage).to(torch.float32), h.device)
    return _Prepared(recipe, perm, None if perm is None else perm.tolist(), factored, h.diagonal() <= 0, shrinkage)


@contextmanager
def _saying_whose(task: RoundingTask) -> Iterator[None]:
    """Run the body of a ``with`` statement. Add the names of the task's layers to errors about the
    Hessian.
    """
    try:
        yield
    except SingularError as error:
        raise SingularError(f"{folded(task.layers)}: {error}") from error
    except NonFiniteError as error:
        raise NonFiniteError(f"{folded(task.layers)}: {error}", tensor=next(iter(task.layers))) from error


def _rounded_rows(
    rows: slice, wt: Tensor, moments: Tensor | None, grid: WeightGrid, prepared: _Prepared, causal: Tensor | None
) -> tuple[Tensor, Tensor, GroupScales]:
    """Round some rows of the weight. Return the rounded rows, their losses, and the scales of their
    groups.
    """
    wt, grid, recipe = wt[:, rows].contiguous(), grid.of_rows(rows), prepared.recipe
    if recipe.static_groups or grid.fixed is not None or grid.group == grid.columns:
        scales = _scales(wt, moments, grid, recipe)
        each = grid.with_subscales(wt, scales)
        swept = ldlq_by_rows(wt, prepared.factor_of_vectors, grid, each, recipe.block, prepared.perm, causal, prepared.perm_on_host)
    else:

        def choose(t: Tensor, number: int) -> GroupScales:
            return _scales(t, None if moments is None else moments[number : number + 1], grid, recipe)

        swept, scales = ldlq_choosing(wt, prepared.factor_of_vectors, grid, choose, causal)
    return swept.q, swept.loss, scales


def _scales(wt: Tensor, moments: Tensor | None, grid: WeightGrid, recipe: Recipe) -> GroupScales:
    """Return the scales of the groups of ``wt [m · group, N]``. `search` documents ``moments``."""
    if recipe.scales == "minmax" or grid.table is not None:  # a table fits only the scales with which it was learned
        return grid.fixed or grid.scales(wt)
    if grid.fixed is not None and moments is None:
        return grid.fixed  # if rows share a scale, plain squared errors would clip the weights of the most important channels
    return search(wt, grid, moments, COARSE if moments is None else TO_A_QUARTER)


def ldlq(
    wt: Tensor, factor: Factor, rounded: Rounder, block: int = BLOCK, order: Tensor | None = None, causal: Tensor | None = None
) -> Swept:
    """Round one column after another, and compensate the error of each column in later columns.

    Column k is rounded from ``t_k = w_k + Σ_{j<k} (w_j − q_j) A_jk``, and ``q_k`` is the grid value nearest
    to ``t_k``. Errors are differences from the original weight w, which does not change. The codes are the
    same as the codes of GPTQ with the same damping and the same order.

    Args:
        wt: Wᵀ ``[K, N]``, float.
        factor: The factor of the damped H, with the channels in the order in which they are rounded.
        rounded: The result of `WeightGrid.rounder` for this order.
        block: Number of columns of a block. Results for different values differ only by rounding errors.
        order: The order in which columns are rounded, as a permutation of the channels ``[K]``. None means
            the original order.
        causal: The result P ``[K, K]`` of `causal_matrix`, for the same order. It is strictly upper
            triangular. If it is given, ``w_k + Σ_{j<k} t_j P_jk`` replaces ``w_k``.
    """
    done = Swept.room_for(wt, order, causal)
    with one_thread(wt.device):
        for start in range(0, wt.shape[0], block):
            stop = min(start + block, wt.shape[0])
            part = _weight(wt[done.places(start, stop)], done, start)
            _round_block(_begun(part, factor, done, start), part, factor, rounded, done, start)
    return done


def ldlq_by_rows(
    wt: Tensor,
    factor: Factor,
    grid: WeightGrid,
    scales: GroupScales,
    block: int = BLOCK,
    order: Tensor | None = None,
    causal: Tensor | None = None,
    order_on_host: Sequence[int] | None = None,
) -> Swept:
    """Run `ldlq` with ``scales``, a result of `WeightGrid.with_subscales`.

    On a CPU, rows are divided into slices, and each slice is rounded in its own thread. ``order_on_host`` is
    ``order`` as a list. If it is None, ``order`` is copied from the device.
    """
    sweeps = []
    for rows in row_slices(wt.shape[1], max(wt.shape[0], WIDE), SLICE * WIDE) if wt.device.type == "cpu" else [slice(0, wt.shape[1])]:
        rounded = grid.rounder(scales.of_rows(rows), order, order_on_host=order_on_host)
        sweeps.append(partial(ldlq, wt[:, rows], factor, rounded, block, order, causal))
    return Swept.beside(parallel_map(call, sweeps, wt.device))


def ldlq_choosing(wt: Tensor, factor: Factor, grid: WeightGrid, choose: Chooser, causal: Tensor | None = None) -> tuple[Swept, GroupScales]:
    """Run `ldlq`, and choose the scales of each group just before the first column of the group is rounded.

    The scales are chosen for the values of the group's columns in which the errors of earlier groups are
    compensated.

    Args:
        wt, factor, causal: As in `ldlq`, with the channels in the original order.
        grid: The quantization grid of ``wt``. ``grid.fixed`` must be None.
        choose: A function that returns the scales of a group. Its arguments are the values ``t [group, N]``
            and the number of the group.

    Returns:
        The rounded weight, and the scales of all groups.
    """
    done = Swept.room_for(wt, causal=causal)
    found = []
    for start in range(0, wt.shape[0], grid.group):
        part = _weight(wt[start : start + grid.group], done, start)
        base = _begun(part, factor, done, start)
        scales = choose(base, start // grid.group)
        found.append(scales)
        spread = grid.with_subscales(base, scales) if grid.has_subscales else scales.expanded(grid.group)
        with one_thread(wt.device):
            _round_block(base, part, factor, grid.rounder(spread, first=start), done, start)
    return done, GroupScales.joined(found)


def _weight(part: Tensor, done: Swept, start: int) -> Tensor:
    """Return the columns ``part [block, N]`` of the weight, corrected with the causal matrix.

    The correction includes the terms of all columns in earlier blocks.

    ``start`` is the number of the first column in ``part``. If there is no causal matrix, return ``part``.
    """
    if done.causal is None or done.t is None:
        return part
    return torch.addmm(part, done.causal[:start, start : start + part.shape[0]].t(), done.t[:start])


def _begun(part: Tensor, factor: Factor, done: Swept, start: int) -> Tensor:
    """Return a copy of the columns ``part [block, N]`` in which the errors of all earlier columns are
    compensated.
    """
    stop = start + part.shape[0]
    return torch.addmm(part, factor.a[:start, start:stop].t(), done.e[:start]) if start else part.clone()


def _round_block(base: Tensor, part: Tensor, factor: Factor, rounded: Rounder, done: Swept, start: int) -> None:
    """Round the columns ``part [block, N]``. ``start`` is the number of the first column in ``part``.

    ``base [block, N]`` is the result of `_begun` for ``part``. It is overwritten.
    """
    a, e = factor.a, done.e[start : start + part.shape[0]]  # [block, N]
    if factor.inner is not None:
        round_vectors(base, part, factor, rounded, done, start)
        return
    if (rounder := _rounder_of_kernel(rounded, base)) is not None:
        from quark_algos.gptq.column_kernel import round_block

        round_block(rounder, base, part, factor, done, start)
        return
    q = torch.empty_like(base)
    e.zero_()  # columns that are not rounded yet are 0, so products may include them, which is cheaper than views without them
    inside = a[start : start + len(part), start : start + len(part)].t().contiguous()  # [block, block], row k: factors of e for column k
    columns = zip(base.unbind(0), part.unbind(0), q.unbind(0), e.unbind(0), strict=True)
    for first in range(0, len(part), FEW):
        few = slice(first, min(first + FEW, len(part)))
        if first:
            base[few].addmm_(inside[few, :first], e[:first])
        errors = e[few].t()
        for k, factors in enumerate(inside[few, few].unbind(0), start + first):
            t, weight, value, error = next(columns)
            if k > start + first:
                t.addmv_(errors, factors)
            if done.causal is not None and done.t is not None:
                added = torch.mv(done.t[start:k].t(), done.causal[start:k, k])
                weight += added
                done.t[k] = t.add_(added)
            torch.sub(weight, rounded(t, k, value), out=error)
    done.q[done.places(start, start + len(part))] = q
    done.loss.add_(torch.mv(base.sub_(q).square_().t(), factor.pivots[start : start + len(part)]))


def _rounder_of_kernel(rounded: Rounder, base: Tensor) -> ColumnRounder | None:
    """Return ``rounded`` if a kernel can use it to round the block ``base``. Return None if torch's
    operations must round the block.
    """
    if not uses_kernels(base.device) or not isinstance(rounded, ColumnRounder) or base.dtype is not torch.float32:
        return None
    return rounded if len(base) <= MOST_COLUMNS and rounded.device_code is not None else None
