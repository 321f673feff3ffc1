"""Candidates: scales by formula, of the ranges of activations and of weights, one for each channel of a mapping."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SMALLEST", "by_activations", "by_both", "relative_weights", "smoothquant"]

SMALLEST = 1e-4
"""Of AWQ's scales, before they are normalised. Source: documented behaviour of AWQ."""


def smoothquant(x_max: Tensor, w_max: Tensor, alpha: float, clamp: float) -> Tensor:
    """SmoothQuant's scales, ``max|x|^α / max|w|^(1−α)``; source: arXiv 2211.10438, equation 4.

    Args:
        x_max: The largest magnitude of each channel of the activations, ``[C]``, float32.
        w_max: The largest magnitude of the weights of each channel, over all balance layers, ``[C]``, float32.
        alpha: Share of the range that moves into the weights, 0 to 1.
        clamp: The smallest scale.

    Returns:
        ``[C]``, float32. 1 where a channel is always 0, or nothing reads it, or its range is not finite: there is nothing to move.
    """
    s = x_max.float().pow(alpha) / w_max.float().pow(1 - alpha)
    return torch.where(_is_known(x_max) & _is_known(w_max), s.clamp_min(clamp), torch.ones_like(s))


def by_activations(x: Tensor, ratios: Tensor) -> Tensor:
    """AWQ's scales, ``x^r``, normalised: the geometric mean of the largest and the smallest is 1. Source: arXiv 2306.00978, equation 5.

    Args:
        x: Mean magnitude, or the largest, of each channel of the activations, ``[C]``, float32.
        ratios: Exponents, ``[R]``; 0 gives scales of 1.

    Returns:
        ``[R, C]``, float32; 1 where a channel is always 0.
    """
    return _normalised(x.float().pow(ratios[:, None].float()), _is_known(x))


def by_both(x: Tensor, w: Tensor, ratios: Tensor) -> Tensor:
    """The same with weights taken into account ("duo scaling"), ``x^r / w^(1−r)``; with `relative_weights` for ``w``.

    Args:
        x: As in `by_activations`.
        w: Mean relative magnitude, or the largest magnitude, of each channel of the weights, ``[C]``, float32.
        ratios: Exponents, ``[R]``.

    Returns:
        ``[R, C]``, float32; 1 where a channel is always 0 or nothing reads it.
    """
    ratios = ratios[:, None].float()
    return _normalised(x.float().pow(ratios) / (w.float().pow(1 - ratios) + SMALLEST), _is_known(x) & _is_known(w))


def relative_weights(wt: Tensor, group: int) -> Tensor:
    """How large a channel's weights are, as a share of the largest in their group and row: mean over rows, ``[K]``, in 0 to 1.

    Args:
        wt: Wᵀ ``[K, N]``, float32.
        group: Input channels that share a scale.
    """
    size = wt.abs().view(-1, group, wt.shape[1])
    return size.div_(size.amax(1, keepdim=True).clamp_min(torch.finfo(wt.dtype).tiny)).mean(2).flatten()


def _is_known(x: Tensor) -> Tensor:
    return (x > 0) & torch.isfinite(x)


def _normalised(s: Tensor, known: Tensor) -> Tensor:
    s = torch.where(known, s.clamp_min(SMALLEST), torch.ones_like(s))
    if not bool(known.any()):
        return s
    live = s[:, known]
    centre = (live.amax(1) * live.amin(1)).sqrt()
    return torch.where(known, s / centre[:, None], s)
