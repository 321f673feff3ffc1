"""Search for the best scales of a mapping: candidates by formula, compared by closed forms in the statistics, without forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

from quark.parallel import parallel_map
from quark.quantizers import WeightGrid
from quark_algos.equalization.candidates import by_activations, by_both, relative_weights
from quark_algos.equalization.quadratic import Quadratic
from quark_algos.mappings.channels import Channels

__all__ = ["AUTOSMOOTH_RATIOS", "AWQ_RATIOS", "ActivationErrors", "Choice", "Loss", "Part", "autosmooth", "awq"]

Loss = Literal["MSE", "MAE", "RMSE"]
AWQ_RATIOS = tuple(i / 20 for i in range(20))
AUTOSMOOTH_RATIOS = tuple(i / 10 for i in range(11))
_STRIDE = 4


@attrs.frozen(eq=False)
class Part:
    """Some balance layers of a mapping: those with the same input and one spec for their weights.

    All parts of a mapping are divided by the same scale: experts, each with the tokens routed to it, are parts of one mapping.

    Attributes:
        wt: Their weights stacked, Wᵀ ``[K, N]``, float32. A sample of the rows is enough, if ``grid_of`` is for these.
        quadratic: Of their inputs, before any scale. Parts, and mappings, with the same input should share the object.
        grid_of: Returns the grid of weights of the shape of ``wt``.
        tokens: Number of tokens that the Hessian was summed over.
    """

    wt: Tensor
    quadratic: Quadratic
    grid_of: Callable[[Tensor], WeightGrid]
    tokens: int = 1

    def error(self, s: Tensor) -> Tensor:
        """``ΔWᵀ [K, N] = Q(W ∘ s) / s − W`` for scales ``[K]``."""
        column = s[:, None]
        scaled = self.wt * column
        grid = self.grid_of(scaled)
        scales = grid.with_subscales(scaled, grid.fixed or grid.scales(scaled))
        return grid.round_(scaled, scales).div_(column).sub_(self.wt)


@attrs.frozen(eq=False)
class ActivationErrors:
    """The error of rounding the layers' inputs: ``tr(W Σ_δ Wᵀ)``, Σ_δ the Hessian of δ, the error of x / s, multiplied back by s.

    Attributes:
        sample: Tokens, x ``[T, K]``, float32; some hundreds are enough.
        range: The smallest and the largest value of each channel in all tokens, ``[2, K]``, float32: what static scales come from.
        round_: Rounds inputs as the layers will, ``[T, K]`` to ``[T, K]``, given their range ``[2, K]``; it may not change them.
    """

    sample: Tensor
    range: Tensor
    round_: Callable[[Tensor, Tensor], Tensor]

    def error(self, s: Tensor) -> Tensor:
        """δ ∘ s, ``[T, K]``, for scales ``[K]``."""
        x = self.sample / s
        return (self.round_(x, self.range / s) - x).mul_(s)


@attrs.frozen(eq=False)
class Choice:
    """The result of a search.

    Attributes:
        scale: The best scales ``[C]``, float32; ones where none is better than no scaling.
        loss: With them; exact.
        plain: Without scaling; exact, and never less than ``loss``.
        tried: Losses of the candidates, by form and ratio, ``[F, R]``, as the screening saw them; NaN where it was not needed.
    """

    scale: Tensor
    loss: float
    plain: float
    tried: Tensor


def awq(
    parts: Sequence[Part],
    x_mean: Tensor,
    *,
    channels: Channels | None = None,
    ratios: Sequence[float] = AWQ_RATIOS,
    duo: bool = True,
    exhaustive: bool = False,
) -> Choice:
    """AWQ's scales: candidates ``x_mean^r``, and with the weights' magnitude, by ``Σ tr(ΔW H ΔWᵀ)``; source: arXiv 2306.00978.

    The loss is that of the layers' outputs, over all tokens of the statistics. The best candidate and no scaling are compared exactly, the
    others by `Quadratic.nearly`.

    Args:
        parts: All balance layers of the mapping whose weights are rounded; at least one.
        x_mean: Mean magnitude of each of their input channels, ``[K]``, float32.
        channels: How channels go to columns; None where they are the same. What columns share is reduced before candidates are made.
        ratios: Exponents, ascending.
        duo: Whether to try both forms.
        exhaustive: Try every ratio; else every fourth, and then those around the best of them, closer and closer.
    """
    channels = channels or Channels(parts[0].wt.shape[0])
    x, exponents = channels.reduced(x_mean.float(), "mean"), torch.tensor(ratios, device=x_mean.device)
    forms = [by_activations(x, exponents)]
    if duo:
        forms.append(by_both(x, channels.reduced(_relative_weights(parts), "mean"), exponents))
    return _search(torch.stack(forms), channels, _Losses(parts, (), "MSE"), exhaustive=exhaustive)


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
    """SmoothQuant's scales with the share searched: the error of rounded weights and that of rounded activations, added up.

    The two are taken as independent: their product, which is small beside them, is left out. Candidates are ``x_max^r``, the documented
    form, and SmoothQuant's own, ``x_max^r / w_max^(1−r)``.

    What is minimised, of E_n, the squared error of output n summed over tokens: MSE, and RMSE, which has the same minimum, ``Σ E_n``; MAE,
    ``Σ √E_n``, to which the mean magnitude of normally distributed errors is proportional.

    Args:
        parts: As in `awq`, with their ``tokens``.
        x_max: The largest magnitude of each input channel, ``[K]``, float32.
        activations: Of the inputs of each part: experts read different tokens.
        channels: As in `awq`.
        ratios: Exponents, ascending.
        loss: ``"MSE"``, ``"MAE"`` or ``"RMSE"``.
        exhaustive: As in `awq`.
    """
    channels = channels or Channels(parts[0].wt.shape[0])
    x, exponents = channels.reduced(x_max.float(), "max"), torch.tensor(ratios, device=x_max.device)
    w = channels.reduced(torch.stack([part.wt.abs().amax(1) for part in parts]).amax(0), "max")
    forms = torch.stack([by_activations(x, exponents), by_both(x, w, exponents)])
    return _search(forms, channels, _Losses(parts, activations, loss), exhaustive=exhaustive)


class _Losses:
    """The objective, exact or nearly so."""

    def __init__(self, parts: Sequence[Part], activations: Sequence[ActivationErrors], loss: Loss) -> None:
        self._parts = parts
        self._activations = activations
        self._by_row = loss == "MAE"
        for part in parts:
            part.quadratic.prepare()
        # tr(W Σ Wᵀ) is the form of W Wᵀ in the errors of activations: what is approximated for one can be for the other.
        self._grams = [Quadratic(part.wt @ part.wt.t()) for part in parts] if activations and not self._by_row else []
        for gram in self._grams:
            gram.prepare()

    def __call__(self, s: Tensor, *, exact: bool) -> float:
        """For scales ``[K]``."""
        deltas = [a.error(s) for a in self._activations]
        if self._by_row:
            each = zip(self._parts, deltas, strict=True)
            return sum(float(self._rows(part, part.error(s), delta, exact=exact).sqrt().sum()) for part, delta in each)
        total = sum(float(_loss(part.quadratic, part.error(s), exact=exact)) for part in self._parts)
        for gram, part, delta in zip(self._grams, self._parts, deltas, strict=False):  # without activations there are none
            total += float(_loss(gram, delta.t(), exact=exact)) * part.tokens / len(delta)
        return total

    def _rows(self, part: Part, error: Tensor, delta: Tensor, *, exact: bool) -> Tensor:
        """E_n, ``[N]``."""
        rows = part.quadratic.rows(error) if exact else part.quadratic.rows_nearly(error)
        return (rows + (delta @ part.wt).square_().sum(0) * (part.tokens / len(delta))).clamp_min(0)


def _loss(quadratic: Quadratic, delta: Tensor, *, exact: bool) -> Tensor:
    return quadratic.exact(delta) if exact else quadratic.nearly(delta)


def _relative_weights(parts: Sequence[Part]) -> Tensor:
    """Of all rows of all parts, ``[K]``."""
    total = sum(relative_weights(p.wt, p.grid_of(p.wt).group) * p.wt.shape[1] for p in parts)
    assert isinstance(total, Tensor)
    return total / sum(p.wt.shape[1] for p in parts)


def _search(forms: Tensor, channels: Channels, losses: _Losses, *, exhaustive: bool) -> Choice:
    """The best of ``[F, R, C]`` and ones."""
    tried = torch.full(forms.shape[:2], torch.nan)
    last = forms.shape[1] - 1

    def attempt(candidates: Iterable[tuple[int, int]]) -> None:
        new = [(form, r) for form, r in sorted(set(candidates)) if tried[form, r].isnan()]
        found = parallel_map(lambda at: losses(channels.expand_scale(forms[at]), exact=False), new, forms.device)
        for at, loss in zip(new, found, strict=True):
            tried[at] = loss

    stride = 1 if exhaustive else _STRIDE
    attempt((form, r) for form in range(len(forms)) for r in (*range(0, last + 1, stride), last))
    while stride > 1:
        stride //= 2
        form, best = divmod(_least(tried), last + 1)
        attempt((form, r) for r in (max(best - stride, 0), min(best + stride, last)))
    form, best = divmod(_least(tried), last + 1)
    ones = torch.ones_like(forms[0, 0])
    plain, loss = parallel_map(lambda s: losses(channels.expand_scale(s), exact=True), [ones, forms[form, best]], forms.device)
    return Choice(forms[form, best].clone(), loss, plain, tried) if loss < plain else Choice(ones, plain, plain, tried)


def _least(tried: Tensor) -> int:
    """Its number; what is not finite counts for nothing."""
    return int(torch.where(torch.isfinite(tried), tried, torch.inf).argmin())
