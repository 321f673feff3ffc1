"""Figures of a rounded layer for the report: signal-to-noise ratio, peak, histograms; measured while its float weight is in memory.

Every figure is a JSON value. Of a large weight a sample of rows is measured, so that the cost of a layer has an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.modules import QuantizedLayer
from quark.modules.layers import linear_weight

__all__ = ["BINS", "SAMPLE", "WORST", "InputSample", "LayerFigures", "decibels", "histogram", "weight_figures"]

SAMPLE = 1 << 20
"""Elements of a weight that are measured: the standard error of a ratio over so many is below 0.01 dB for any distribution near normal."""
BINS = 96
"""Bins of a histogram: grids of up to 6 bits are told apart, and a page with `WORST` layers stays small."""
WORST = 8
"""Layers whose histograms are kept: those with the lowest signal-to-noise ratio so far."""
_HISTOGRAM_SAMPLE = 1 << 17
_INPUT_SAMPLE = 1 << 14
_GOLDEN_RATIO = (5**0.5 - 1) / 2


@attrs.frozen(eq=False)
class InputSample:
    """Some values of a layer's input.

    Attributes:
        values: In float, ``[n]``.
        rounded: The same values as the layer reads them, ``[n]``; None where the input is not quantized.
        peak_to_rms: Largest magnitude of the whole tensor ÷ its root mean square.
    """

    values: Tensor
    rounded: Tensor | None
    peak_to_rms: float

    @classmethod
    def of(cls, x: Tensor, rounded: Tensor | None) -> InputSample:
        """Return a sample of ``x [tokens, K]`` and of its rounded values, of the same shape or None."""
        pick = _evenly(x.numel(), _INPUT_SAMPLE, x.device)
        kept = None if rounded is None else rounded.reshape(-1)[pick].float()
        return cls(x.reshape(-1)[pick].float(), kept, _peak_to_rms(x.float()))


class LayerFigures:
    """Figures of the layers of a run.

    Args:
        weights: Gets, by full name: ``snr_db`` (as `decibels`), ``peak_to_rms`` (largest magnitude ÷ root mean square of the float weight),
            ``elements`` that were measured, and ``input_peak_to_rms`` where calibration has seen the input.
        histograms: Gets, of the `WORST` layers, by full name: ``weight`` and, where calibration has seen it, ``input``, as `histogram`.
        sample: Elements of each weight that are measured; None measures all.
    """

    def __init__(self, weights: dict[str, dict[str, Any]], histograms: dict[str, dict[str, Any]], sample: int | None = SAMPLE) -> None:
        self._weights = weights
        self._histograms = histograms
        self._sample = sample

    @torch.no_grad()
    def add(self, floats: Mapping[str, nn.Module], layers: Mapping[str, QuantizedLayer], inputs: Mapping[str, InputSample]) -> None:
        """Measure layers.

        Args:
            floats: The float layers by full name.
            layers: The quantized layers with their rounded weights, by the same names; those whose weight stays float are left out.
            inputs: Samples of inputs, by the same names; of some layers or none.
        """
        for name, layer in layers.items():
            if layer.weight_quantizer is None:
                continue
            weight, rounded = linear_weight(floats[name]).detach(), layer.weight.detach()  # type: ignore[operator]
            self._weights[name] = weight_figures(weight, rounded, self._sample)
            if name in inputs:
                self._weights[name]["input_peak_to_rms"] = inputs[name].peak_to_rms
            self._keep_histograms(name, weight, rounded, inputs.get(name))

    def _keep_histograms(self, name: str, weight: Tensor, rounded: Tensor, sample: InputSample | None) -> None:
        """Keep the histograms of a layer if it is among the worst so far."""
        order = {n: _rank(self._weights[n]["snr_db"]) for n in (*self._histograms, name)}
        best = max(order, key=lambda n: order[n])
        if len(self._histograms) == WORST:
            if best == name:
                return
            del self._histograms[best]
        pick = _evenly(weight.numel(), _HISTOGRAM_SAMPLE, weight.device)
        self._histograms[name] = {"weight": histogram(weight.reshape(-1)[pick], rounded.reshape(-1)[pick])}
        if sample is not None:
            self._histograms[name]["input"] = histogram(sample.values, sample.rounded)


def weight_figures(weight: Tensor, rounded: Tensor, sample: int | None = SAMPLE) -> dict[str, Any]:
    """Return figures of a weight, measured on at most ``sample`` elements: whole rows, evenly spaced.

    Returns:
        ``snr_db``: 10 log10(‖W‖² ÷ ‖W − Q‖²), None where it is not a number, as `decibels`; ``peak_to_rms``; ``elements``.
    """
    weight, rounded = weight.reshape(weight.shape[0], -1), rounded.reshape(weight.shape[0], -1)
    if sample is not None and weight.numel() > sample:
        rows = _evenly(weight.shape[0], max(1, sample // weight.shape[1]), weight.device)
        weight, rounded = weight[rows], rounded[rows]
    values = weight.float()
    signal = float(values.square().sum())
    peak = _peak_to_rms(values, signal)
    noise = float((values - rounded).square_().sum())
    return {"snr_db": decibels(signal, noise), "peak_to_rms": peak, "elements": weight.numel()}


def decibels(signal: float, noise: float) -> float | None:
    """Return 10 log10(signal ÷ noise) in dB; None where that is not a finite number: without noise, or without signal.

    >>> decibels(100.0, 1.0), decibels(1.0, 0.0)
    (20.0, None)
    """
    if not (signal > 0 and noise > 0 and math.isfinite(signal) and math.isfinite(noise)):
        return None
    return 10 * math.log10(signal / noise)


def histogram(values: Tensor, rounded: Tensor | None) -> dict[str, Any]:
    """Return counts of float and rounded values in `BINS` equal bins over the range of both.

    Returns:
        ``low`` and ``high``, the ends of the range; ``float``, a list of counts; ``rounded``, likewise, or None.
    """
    both = values if rounded is None else torch.cat([values.float(), rounded.float()])
    low, high = (float(end) for end in torch.aminmax(both.float()))
    high = high if high > low else low + 1.0
    counts = [None if x is None else [int(c) for c in torch.histc(x.float(), BINS, low, high)] for x in (values, rounded)]
    return {"low": low, "high": high, "float": counts[0], "rounded": counts[1]}


def _peak_to_rms(values: Tensor, square_sum: float | None = None) -> float:
    total = float(values.square().sum()) if square_sum is None else square_sum
    rms = math.sqrt(total / max(values.numel(), 1))
    low, high = torch.aminmax(values)
    return max(-float(low), float(high)) / rms if rms > 0 else 0.0


def _evenly(count: int, most: int, device: torch.device) -> Tensor:
    """Return at most ``most`` indices below ``count``, one of each of as many equal parts.

    The place in a part changes from part to part by the golden ratio: with a constant step, all indices could fall in one column or group.
    """
    if count <= most:
        return torch.arange(count, device=device)
    number = torch.arange(most, device=device, dtype=torch.float64)
    return ((number + (number * _GOLDEN_RATIO).frac()) * (count / most)).long().clamp_(max=count - 1)


def _rank(snr_db: float | None) -> float:
    """Return the place of a layer by its ratio; one without error comes last."""
    return math.inf if snr_db is None else snr_db
