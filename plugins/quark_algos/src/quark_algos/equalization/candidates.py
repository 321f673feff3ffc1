"""Candidate scales of a mapping by formula, one per channel, from the ranges of activations and weights."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SMALLEST", "by_activations", "by_both", "relative_weights", "smoothquant"]

SMALLEST = 1e-4
"""Smallest scale of AWQ before normalization; the reference implementation of AWQ clamps at the same value."""


def smoothquant(x_max: Tensor, w_max: Tensor, alpha: float, clamp: float) -> Tensor:
    """Return SmoothQuant's scales, ``max|x|^α / max|w|^(1−α)``; source: arXiv 2211.10438, equation 4.

    Args:
        x_max: The largest magnitude of each channel of the activations, ``[C]``, float32.
        w_max: The largest magnitude of the weights of each channel, over all balance layers, ``[C]``,
            float32.
        alpha: α, the migration strength, 0 to 1.
        clamp: The smallest scale.

    Returns:
        Scales ``[C]``, float32; 1 for channels whose activations or weights are all 0 or not finite.
    """
    s = x_max.float().pow(alpha) / w_max.float().pow(1 - alpha)
    return torch.where(_is_known(x_max) & _is_known(w_max), s.clamp_min(clamp), torch.ones_like(s))


def by_activations(x: Tensor, ratios: Tensor) -> Tensor:
    """Return AWQ's scales, ``x^r``, with the geometric mean of largest and smallest normalized to 1; source: arXiv 2306.00978, eq. 5.

    Args:
        x: Mean or largest magnitude of each channel of the activations, ``[C]``, float32.
        ratios: Exponents, ``[R]``; 0 gives scales of 1.

    Returns:
        Scales ``[R, C]``, float32; 1 for channels that are always 0.
    """
    return _normalized(x.float().pow(ratios[:, None].float()), _is_known(x))


def by_both(x: Tensor, w: Tensor, ratios: Tensor) -> Tensor:
    """Return scales from activations and weights ("duo scaling"), ``x^r / w^(1−r)``, normalized; AWQ passes `relative_weights` as ``w``.

    Args:
        x: As in `by_activations`.
        w: Mean relative magnitude, or the largest magnitude, of each channel of the weights, ``[C]``,
            float32.
        ratios: Exponents, ``[R]``.

    Returns:
        Scales ``[R, C]``, float32; 1 for channels whose activations or weights are all 0.
    """
    ratios = ratios[:, None].float()
    return _normalized(x.float().pow(ratios) / (w.float().pow(1 - ratios) + SMALLEST), _is_known(x) & _is_known(w))


def relative_weights(wt: Tensor, group: int) -> Tensor:
    """Return the mean over rows of ``|w| ÷ max|w| of its group and row``, per input channel: ``[K]``, 0 to 1.

    Args:
        wt: Wᵀ ``[K, N]``, float32.
        group: Input channels that share a scale.
    """
    size = wt.abs().view(-1, group, wt.shape[1])
    return size.div_(size.amax(1, keepdim=True).clamp_min(torch.finfo(wt.dtype).tiny)).mean(2).flatten()


def _is_known(x: Tensor) -> Tensor:
    return (x > 0) & torch.isfinite(x)


def _normalized(s: Tensor, known: Tensor) -> Tensor:
    s = torch.where(known, s.clamp_min(SMALLEST), torch.ones_like(s))
    centre = (torch.where(known, s, 0).amax(1) * torch.where(known, s, torch.inf).amin(1)).sqrt()
    return torch.where(known, s / centre[:, None], s)
