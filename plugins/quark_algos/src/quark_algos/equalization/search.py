"""Search for the best scales of a mapping among candidates, and round-to-nearest under searched scales.

Losses are closed forms in the statistics, so no forwards are run. `SearchedNearest` is AWQ's clipping (arXiv
2306.00978) as a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import attrs
import torch
from torch import Tensor

from quark.algorithms import AbsMean, Hessian, Metrics, Rounding, RoundingTask
from quark.base.parallel import coarsely, parallel_map
from quark.base.scalars import divided, numbers
from quark.numbers import GroupScales, WeightGrid
from quark_algos.equalization.candidates import Quadratic, by_activations, by_both, relative_weights
from quark_algos.gptq.damping import shrunk
from quark_algos.mappings.resolve import Channels
from quark_algos.scale_search import group_moments, search

__all__ = [
    "AUTOSMOOTH_RATIOS",
    "AWQ_RATIOS",
    "AbsMeanOfSample",
    "ActivationErrors",
    "Choice",
    "HessianForGroups",
    "HessianOfSample",
    "Loss",
    "Part",
    "SearchedNearest",
    "autosmooth",
    "awq",
]


Loss = Literal["MSE", "MAE", "RMSE"]
AWQ_RATIOS = tuple(i / 20 for i in range(20))
AUTOSMOOTH_RATIOS = tuple(i / 10 for i in range(11))
_STRIDE = 4
"""First step of the ratios in a coarse-to-fine search; a power of two, halved until it is 1."""


class HessianOfSample(Hessian):
    """`Hessian` of a quarter of the tokens, for comparing candidates."""

    one_in: ClassVar[int] = 4


class AbsMeanOfSample(AbsMean):
    """`AbsMean` of the tokens of `HessianOfSample`."""

    one_in: ClassVar[int] = 4


class HessianForGroups(Hessian):
    """`Hessian` of half of the tokens, for scales of groups.

    Group scales need more tokens than candidates, but fewer than codes.
    """

    one_in: ClassVar[int] = 2


@attrs.frozen(eq=False)
class Part:
    """Balance layers of a mapping that share their input and their weight spec.

    All parts of a mapping have the same scale: experts, each with the tokens routed to it, are parts of one
    mapping.

    Attributes:
        wt: Stacked weights of the layers, Wᵀ ``[K, N]``, float32. A sample of the rows is enough if
            ``grid_of`` matches it.
        quadratic: Loss from the Hessian of the unscaled input. Parts and mappings with the same input should
            share the object.
        grid_of: Returns the grid for weights with the shape of ``wt``.
        tokens: Number of tokens that the Hessian was summed over.
    """

    wt: Tensor
    quadratic: Quadratic
    grid_of: Callable[[Tensor], WeightGrid]
    tokens: int = 1

    def error(self, s: Tensor) -> Tensor:
        """Return the rounding error ``ΔWᵀ [K, N] = Q(W ∘ s) / s − W`` for scales ``[K]``."""
        column = s[:, None]
        scaled = self.wt * column
        grid = self.grid_of(scaled)
        scales = grid.with_subscales(scaled, grid.fixed or grid.scales(scaled))
        return grid.round_(scaled, scales).div_(column).sub_(self.wt)


@attrs.frozen(eq=False)
class ActivationErrors:
    """Computes the rounding error δ of the layers' inputs.

    The loss is ``tr(W Σ_δ Wᵀ)``, with Σ_δ the Hessian of δ.

    Attributes:
        sample: Sample of tokens, x ``[T, K]``, float32; some hundreds are enough.
        range: Smallest and largest value of each channel over all tokens, ``[2, K]``, float32; static scales
            come from it.
        round_: Returns inputs ``[T, K]`` rounded as the layers will round them, given the range ``[2, K]``;
            must not change its argument.
    """

    sample: Tensor
    range: Tensor
    round_: Callable[[Tensor, Tensor], Tensor]

    def error(self, s: Tensor) -> Tensor:
        """Return the error of ``x / s`` multiplied back by s, ``[T, K]``, for scales ``[K]``."""
        x = self.sample / s
        return (self.round_(x, self.range / s) - x).mul_(s)


@attrs.frozen(eq=False)
class Choice:
    """The result of a search.

    Attributes:
        scale: The best scales ``[C]``, float32; ones if no candidate is better than no scaling.
        loss: Loss with these scales.
        plain: Loss without scaling, at least ``loss``.
        tried: Losses of the candidates, by form and ratio, ``[F, R]``; NaN for candidates that
            were not evaluated.
    """

    scale: Tensor
    loss: float
    plain: float
    tried: Tensor


def awq(
    parts: Sequence[Part],
    x_mean: Tensor,
    activations: Sequence[ActivationErrors] = (),
    *,
    channels: Channels | None = None,
    ratios: Sequence[float] = AWQ_RATIOS,
    exhaustive: bool = False,
) -> Choice:
    """Return AWQ's scales: the best of ``x_mean^r`` and "duo scaling" by the loss ``Σ tr(ΔW H ΔWᵀ)``.

    Source: arXiv 2306.00978.

    The loss is the output error of the balance layers over all tokens of the statistics. It is
    approximated by `Quadratic`, for candidates and for no scaling alike. If the layers round their inputs
    too, the loss adds that error, as in `autosmooth`.

    Args:
        parts: All balance layers of the mapping whose weights are rounded; at least one.
        x_mean: Mean magnitude of each input channel, ``[K]``, float32.
        activations: Rounding errors of the inputs of each part; empty if inputs are not rounded.
        channels: How the channels of the smooth layer correspond to input channels; None if they are the
            same.
        ratios: Exponents, ascending.
        exhaustive: Whether to try every ratio; otherwise the search is coarse to fine, from every fourth
            ratio.
    """
    channels = channels or Channels(parts[0].wt.shape[0])
    x, exponents = channels.reduced(x_mean.float(), "mean"), torch.tensor(ratios, dtype=torch.float32, device=x_mean.device)
    with coarsely(_largest(parts), x_mean.device):
        w = channels.reduced(_relative_weights(parts), "mean")
        forms = torch.stack([by_activations(x, exponents), by_both(x, w, exponents)])
        return _search(forms, channels, _Losses(parts, activations, "MSE"), exhaustive=exhaustive)


def autosmooth(
    parts: Sequence[Part],
    x_max: Tensor,
    activations: Sequence[ActivationErrors],
    *,
    channels: Channels | None = None,
    ratios: Sequence[float] = AUTOSMOOTH_RATIOS,
    loss: Loss = "MSE",
    exhaustive: bool = False,
) -> Choice:
    """Return SmoothQuant's scales with a searched exponent.

    The loss adds the errors from rounding weights and rounding activations.

    It neglects the product of the two errors, which is small. Candidates are ``x_max^r``, the form in AMD
    Quark's documentation, and ``x_max^r / w_max^(1−r)``, SmoothQuant's own form.

    E_n is the squared error of output n, summed over tokens. For MSE and RMSE, which have the same minimum,
    the loss is ``Σ E_n``. For MAE it is ``Σ √E_n``: the mean magnitude of normally distributed errors is
    proportional to ``√E_n``.

    Args:
        parts: As in `awq`, with their ``tokens``.
        x_max: Largest magnitude of each input channel, ``[K]``, float32.
        activations: Rounding errors of the inputs of each part: experts read different tokens.
        channels: As in `awq`.
        ratios: Exponents, ascending.
        loss: ``"MSE"``, ``"MAE"`` or ``"RMSE"``.
        exhaustive: As in `awq`.
    """
    channels = channels or Channels(parts[0].wt.shape[0])
    x, exponents = channels.reduced(x_max.float(), "max"), torch.tensor(ratios, dtype=torch.float32, device=x_max.device)
    with coarsely(_largest(parts), x_max.device):
        w = channels.reduced(torch.stack([part.wt.abs().amax(1) for part in parts]).amax(0), "max")
        forms = torch.stack([by_activations(x, exponents), by_both(x, w, exponents)])
        return _search(forms, channels, _Losses(parts, activations, loss), exhaustive=exhaustive)


def _largest(parts: Sequence[Part]) -> int:
    """Return the number of elements of the largest weight or Hessian."""
    return max(max(part.wt.numel(), part.wt.shape[0] ** 2) for part in parts)


class _Losses:
    """The loss of scales, by `Quadratic`'s approximation."""

    def __init__(self, parts: Sequence[Part], activations: Sequence[ActivationErrors], loss: Loss) -> None:
        self._parts = parts
        self._activations = activations
        self._by_row = loss == "MAE"
        for part in parts:
            part.quadratic.prepare()
        # tr(W Σ_δ Wᵀ) is a quadratic form of W Wᵀ in the errors of activations, so the same approximation
        # applies.
        self._grams = [Quadratic(part.wt @ part.wt.t()) for part in parts] if activations and not self._by_row else []
        for gram in self._grams:
            gram.prepare()

    def __call__(self, s: Tensor) -> Tensor:
        """Return the loss of scales ``[K]``, a float64 scalar."""
        deltas = [a.error(s) for a in self._activations]
        if self._by_row:
            each = zip(self._parts, deltas, strict=True)
            rows = [self._rows(part, part.error(s), delta).sqrt().sum().double() for part, delta in each]
            return torch.stack(rows).sum()
        total = torch.stack([part.quadratic.rows(part.error(s)).sum().double() for part in self._parts]).sum()
        for gram, part, delta in zip(self._grams, self._parts, deltas, strict=False):  # empty without activations
            total = total + gram.rows(delta.t()).sum().double() * part.tokens / len(delta)
        return total

    def _rows(self, part: Part, error: Tensor, delta: Tensor) -> Tensor:
        """Return E_n, ``[N]``."""
        rows = part.quadratic.rows(error)
        return (rows + (delta @ part.wt).square_().sum(0) * (part.tokens / len(delta))).clamp_min(0)


def _relative_weights(parts: Sequence[Part]) -> Tensor:
    """Return `relative_weights` averaged over the rows of all parts, ``[K]``."""
    total = sum(relative_weights(p.wt, p.grid_of(p.wt).group) * p.wt.shape[1] for p in parts)
    assert isinstance(total, Tensor)
    return divided(total, sum(p.wt.shape[1] for p in parts))


def _search(forms: Tensor, channels: Channels, losses: _Losses, *, exhaustive: bool) -> Choice:
    """Return the best of the candidates ``[F, R, C]``, or ones if no candidate is better."""
    tried = torch.full(forms.shape[:2], torch.nan, dtype=torch.float64)
    last = forms.shape[1] - 1

    def attempt(candidates: Iterable[tuple[int, int]]) -> None:
        new = [(form, r) for form, r in sorted(set(candidates)) if tried[form, r].isnan()]
        if not new:
            return
        losses_of_new = parallel_map(lambda at: losses(channels.expand_scale(forms[at])), new, forms.device)
        for at, loss in zip(new, numbers(*losses_of_new), strict=True):
            tried[at] = loss

    stride = 1 if exhaustive else _STRIDE
    attempt((form, r) for form in range(len(forms)) for r in (*range(0, last + 1, stride), last))
    while stride > 1:
        stride //= 2
        form, best = divmod(_least(tried), last + 1)
        attempt((form, r) for r in (max(best - stride, 0), min(best + stride, last)))
    form, best = divmod(_least(tried), last + 1)
    ones = torch.ones_like(forms[0, 0])
    plain, loss = float(losses(channels.expand_scale(ones))), float(tried[form, best])
    return Choice(forms[form, best].clone(), loss, plain, tried) if loss < plain else Choice(ones, plain, plain, tried)


def _least(tried: Tensor) -> int:
    """Return the flat index of the smallest finite loss."""
    return int(torch.where(torch.isfinite(tried), tried, torch.inf).argmin())


class SearchedNearest(Rounding):
    """Rounds every element to nearest, under the group scales with the smallest output error."""

    needs = (HessianForGroups,)

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round to nearest under searched scales; return empty metrics."""
        hessian = task.statistic(HessianForGroups)
        weights = task.stacked()
        grid = weights.grid()
        moments = group_moments(shrunk(hessian.matrix(), hessian.shrinkage()), grid.group)

        def searched(rows: slice) -> GroupScales:
            return search(weights.wt[:, rows], grid.of_rows(rows), moments)

        rows = weights.wt.shape[1]
        # Rows are independent, unless scales span them.
        scales = GroupScales.beside(task.by_rows(searched, rows)) if grid.fixed is None else search(weights.wt, grid, moments)
        weights.keep(grid, grid.round_(weights.wt, grid.with_subscales(weights.wt, scales)), scales)
        return {name: {} for name in task.layers}
