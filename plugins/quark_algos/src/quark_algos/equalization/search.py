"""Functions that search the best scales of a mapping among candidates. `SearchedNearest` also searches the
scales of groups.

Losses are computed from statistics, so no forward passes are needed. `SearchedNearest` is the clipping of AWQ
(arXiv 2306.00978).
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
"""A coarse-to-fine search first tries every ratio at this distance. The distance is a power of two, and is
halved until it is 1.
"""


class HessianOfSample(Hessian):
    """The `Hessian` of a quarter of the tokens. It is used to compare candidates."""

    one_in: ClassVar[int] = 4


class AbsMeanOfSample(AbsMean):
    """The `AbsMean` of the same tokens as `HessianOfSample`."""

    one_in: ClassVar[int] = 4


class HessianForGroups(Hessian):
    """The `Hessian` of half of the tokens. It is used to search the scales of groups.

    This search needs more tokens than the comparison of candidates, but fewer tokens than the choice of
    codes.
    """

    one_in: ClassVar[int] = 2


@attrs.frozen(eq=False)
class Part:
    """The balance layers of a mapping that share their input and their weight spec.

    All parts of a mapping get the same scales. For example, each expert is a part of its own, because experts
    get different tokens.

    Attributes:
        wt: The stacked weights of the layers, Wᵀ ``[K, N]``, float32. It may contain only some rows of W, if
            ``grid_of`` is for the same rows.
        quadratic: Computes the loss from the Hessian of the unscaled input. Parts and mappings with the same
            input should share this object.
        grid_of: A function that returns the quantization grid for a weight of the same shape as ``wt``.
        tokens: Number of tokens in the Hessian.
    """

    wt: Tensor
    quadratic: Quadratic
    grid_of: Callable[[Tensor], WeightGrid]
    tokens: int = 1

    def error(self, s: Tensor) -> Tensor:
        """Return the rounding error ``ΔWᵀ [K, N]`` for scales s ``[K]``.

        It is the transpose of ``Q(W ∘ s) / s − W``. Q rounds to the grid, and ∘ multiplies each input channel
        by its scale.
        """
        column = s[:, None]
        scaled = self.wt * column
        grid = self.grid_of(scaled)
        scales = grid.with_subscales(scaled, grid.fixed or grid.scales(scaled))
        return grid.round_(scaled, scales).div_(column).sub_(self.wt)


@attrs.frozen(eq=False)
class ActivationErrors:
    """Computes the rounding error δ of the inputs of the layers in a part.

    The loss is ``tr(W Σ_δ Wᵀ)``. Σ_δ is the Hessian of δ.

    Attributes:
        sample: A sample of the layers' inputs, x ``[T, K]``, float32. A few hundred tokens are enough.
        range: Smallest and largest value of each channel over all tokens, ``[2, K]``, float32. Static scales
            are computed from this range.
        round_: A function with two arguments: inputs ``[T, K]`` and the range ``[2, K]``. It returns the
            inputs, rounded as the layers will round them, and must not change its arguments.
    """

    sample: Tensor
    range: Tensor
    round_: Callable[[Tensor, Tensor], Tensor]

    def error(self, s: Tensor) -> Tensor:
        """Return the rounding error of ``x / s``, multiplied by s, as a tensor ``[T, K]``. The scales s are
        ``[K]``.
        """
        x = self.sample / s
        return (self.round_(x, self.range / s) - x).mul_(s)


@attrs.frozen(eq=False)
class Choice:
    """The result of a search.

    Attributes:
        scale: The best scales ``[C]``, float32. If no candidate is better than the unscaled mapping, all
            scales are 1.
        loss: The loss with these scales.
        plain: The loss without scaling. It is never smaller than ``loss``.
        tried: The loss of each candidate, ``[F, R]``, for F forms of the scales and R exponents. It is NaN
            for candidates that were not evaluated.
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
    """Search AWQ's scales, and return the candidate with the smallest loss ``Σ tr(ΔW H ΔWᵀ)``.

    For each exponent r, there are two candidates: ``x_mean^r``, and "duo scaling" (`by_both`). Source: arXiv
    2306.00978.

    The loss is the output error of the balance layers over all tokens of the statistics. `Quadratic`
    approximates the loss, both of the candidates and of the unscaled mapping. If the layers also round their
    inputs, the loss includes the error of this rounding, as in `autosmooth`.

    Args:
        parts: All balance layers of the mapping whose weights are rounded. There must be at least one part.
        x_mean: Mean magnitude of each input channel, ``[K]``, float32.
        activations: One object per part, for the rounding errors of the inputs. It is empty if inputs are not
            rounded.
        channels: How the channels of the smooth layer correspond to the input channels of the balance layers.
            If it is None, they are the same channels.
        ratios: The exponents, in ascending order.
        exhaustive: Whether to try every exponent. If it is False, the search is coarse to fine: it first
            tries every fourth exponent.
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
    """Search the exponent r of SmoothQuant's scales, and return the best candidate.

    For each exponent r, there are two candidates. ``x_max^r`` is the formula in AMD Quark's documentation,
    and ``x_max^r / w_max^(1−r)`` is the formula in SmoothQuant's paper. The loss is the sum of the errors
    from rounding weights and from rounding activations. The product of the two errors is small, so it is
    neglected.

    E_n is the squared error of output n, summed over tokens. For MSE and RMSE, which have the same minimum,
    the loss is ``Σ E_n``. For MAE, the loss is ``Σ √E_n``, because the mean magnitude of normally distributed
    errors is proportional to ``√E_n``.

    Args:
        parts: As in `awq`. Their ``tokens`` must be set.
        x_max: Largest magnitude of each input channel, ``[K]``, float32.
        activations: One object per part, for the rounding errors of the inputs. Experts need objects of their
            own, because they get different tokens.
        channels: As in `awq`.
        ratios: The exponents, in ascending order.
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
    """Return the number of elements of the largest matrix among all weights and Hessians of the parts."""
    return max(max(part.wt.numel(), part.wt.shape[0] ** 2) for part in parts)


class _Losses:
    """Computes the loss for given scales. `Quadratic` approximates the loss."""

    def __init__(self, parts: Sequence[Part], activations: Sequence[ActivationErrors], loss: Loss) -> None:
        self._parts = parts
        self._activations = activations
        self._by_row = loss == "MAE"
        for part in parts:
            part.quadratic.prepare()
        # tr(W Σ_δ Wᵀ) has the same form as the loss of weights, with Wᵀ W in place of H, so the same
        # approximation is used.
        self._grams = [Quadratic(part.wt @ part.wt.t()) for part in parts] if activations and not self._by_row else []
        for gram in self._grams:
            gram.prepare()

    def __call__(self, s: Tensor) -> Tensor:
        """Return the loss for scales ``[K]``, as a float64 scalar."""
        deltas = [a.error(s) for a in self._activations]
        if self._by_row:
            each = zip(self._parts, deltas, strict=True)
            rows = [self._rows(part, part.error(s), delta).sqrt().sum().double() for part, delta in each]
            return torch.stack(rows).sum()
        total = torch.stack([part.quadratic.rows(part.error(s)).sum().double() for part in self._parts]).sum()
        for gram, part, delta in zip(self._grams, self._parts, deltas, strict=False):  # no iteration if activations are not rounded
            total = total + gram.rows(delta.t()).sum().double() * part.tokens / len(delta)
        return total

    def _rows(self, part: Part, error: Tensor, delta: Tensor) -> Tensor:
        """Return E_n, the squared error of each output, ``[N]``."""
        rows = part.quadratic.rows(error)
        return (rows + (delta @ part.wt).square_().sum(0) * (part.tokens / len(delta))).clamp_min(0)


def _relative_weights(parts: Sequence[Part]) -> Tensor:
    """Return the mean of `relative_weights` over the rows of all parts, ``[K]``."""
    total = sum(relative_weights(p.wt, p.grid_of(p.wt).group) * p.wt.shape[1] for p in parts)
    assert isinstance(total, Tensor)
    return divided(total, sum(p.wt.shape[1] for p in parts))


def _search(forms: Tensor, channels: Channels, losses: _Losses, *, exhaustive: bool) -> Choice:
    """Return the best candidate in ``forms [F, R, C]``, or scales of 1 if no candidate is better than scales
    of 1.
    """
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
    """Return the index of the smallest finite loss in the flattened tensor."""
    return int(torch.where(torch.isfinite(tried), tried, torch.inf).argmin())


class SearchedNearest(Rounding):
    """Rounds every element to nearest, with the group scales that give the smallest output error."""

    needs = (HessianForGroups,)

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Search the scales of a task's layers, and round the weights to nearest.

        Return a dictionary with empty metrics for each layer.
        """
        hessian = task.statistic(HessianForGroups)
        weights = task.stacked()
        grid = weights.grid()
        moments = group_moments(shrunk(hessian.matrix(), hessian.shrinkage()), grid.group)

        def searched(rows: slice) -> GroupScales:
            return search(weights.wt[:, rows], grid.of_rows(rows), moments)

        rows = weights.wt.shape[1]
        # Rows are independent of each other, unless scales span rows.
        scales = GroupScales.beside(task.by_rows(searched, rows)) if grid.fixed is None else search(weights.wt, grid, moments)
        weights.keep(grid, grid.round_(weights.wt, grid.with_subscales(weights.wt, scales)), scales)
        return {name: {} for name in task.layers}
