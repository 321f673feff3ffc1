"""Metrics of a rounded layer for the report: signal-to-noise ratio, largest magnitude, and histograms.

The metrics are measured while the float weight of the layer is in memory. Every metric is a JSON value. For a
large weight, a sample of elements is measured, so that the time for a layer is bounded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.base.parallel import one_thread
from quark.base.scalars import decibels
from quark.models.layers import QuantizedLayer, QuantizerModule
from quark.models.layers.quantized_layers import linear_weight
from quark.numbers import QParams
from quark.numbers.on_grid import sample_of_rows

SAMPLE = 1 << 15
"""Number of elements of a weight that are measured, in evenly spread runs.

In trained models, the standard error of a ratio is about 0.1 dB. If the rounded values of a weight are not
computed, whole rows are measured.
"""
BINS = 96
"""Bins of a histogram: they show grids of up to 6 bits, and a page with `WORST` layers stays small."""
WORST = 8
"""Number of layers whose histograms are kept: those with the lowest signal-to-noise ratio so far."""
_INPUT_SAMPLE = 1 << 14
_SCALE_SAMPLE = 1 << 12
_RUN = 64
_GOLDEN_RATIO = (5**0.5 - 1) / 2


@attrs.frozen(eq=False)
class InputSample:
    """A sample of n elements from the input of a layer.

    Attributes:
        values: The float values of the sample, ``[n]``.
        rounded: The quantized values of the sample, ``[n]``; None if the input is not quantized.
        extent: The sum of squares, the smallest and the largest value of the whole input, as float32 ``[3]``.
        elements: The number of elements of the whole input.
    """

    values: Tensor
    rounded: Tensor | None
    extent: Tensor
    elements: int

    @classmethod
    def of(cls, x: Tensor, rounded: Tensor | None) -> InputSample:
        """Return a sample of the input ``x [tokens, K]``.

        ``rounded`` has the quantized values of ``x`` in the same shape; it is None if they are not quantized.
        """
        with one_thread(x.device):
            kept = None if rounded is None else _sampled(rounded, _INPUT_SAMPLE)
            return cls(_sampled(x, _INPUT_SAMPLE), kept, _extent(x.float()), x.numel())


class LayerFigures:
    """Measures the layers of a run, and adds the metrics to two dictionaries.

    Args:
        weights: Dictionary to which the metrics of each layer are added under its full name. These are
            ``snr_db``, the signal-to-noise ratio 10 log10(‖W‖² ÷ ‖W − Q‖²) of the weight W and the rounded
            weight Q; ``peak_to_rms``, the largest magnitude ÷ the root mean square; ``elements``, the number
            of measured elements; ``scale_ratio``, the largest scale ÷ the median scale, or None for a single
            scale; and ``input_peak_to_rms`` if there is a sample of the input.
        histograms: Dictionary to which the histograms of the `WORST` layers are added under their full names.
            These are ``weight``, and ``input`` if there is a sample of the input (see `histograms`).
    """

    def __init__(self, weights: dict[str, dict[str, Any]], histograms: dict[str, dict[str, Any]]) -> None:
        self._weights = weights
        self._histograms = histograms

    @torch.no_grad()
    def add(self, floats: Mapping[str, nn.Module], layers: Mapping[str, QuantizedLayer], inputs: Mapping[str, InputSample]) -> None:
        """Measure some layers.

        Args:
            floats: Dictionary from full name to float layer.
            layers: Dictionary from full name to the quantized layer with its rounded weight. Layers whose
                weight stays float are skipped.
            inputs: Dictionary from full name to a sample of the input. It may lack some layers, or all.
        """
        compared: dict[str, tuple[Tensor, Tensor]] = {}
        sums: list[Tensor] = []
        for name, layer in layers.items():
            if layer.weight_quantizer is None:
                continue
            weight = linear_weight(floats[name]).detach()
            with one_thread(weight.device):
                values, rounded = compared[name] = _compared(weight, layer, layer.weight_quantizer)
                sums += [torch.cat([_extent(values), (values - rounded).square_().sum()[None]])]
                sums += [_scale_sizes(layer.weight_quantizer.qparams, weight.device)]
                sums += [inputs[name].extent] if name in inputs else []
        if not compared:
            return
        rows = iter(_on_host(sums))
        for name, (values, _) in compared.items():
            elements = values.numel()
            signal, low, high, noise = next(rows)
            figures = {"snr_db": decibels(signal, noise), "peak_to_rms": _peak_to_rms(elements, signal, low, high), "elements": elements}
            largest, median = next(rows)
            figures["scale_ratio"] = largest / median if median > 0 else None
            if name in inputs:
                figures["input_peak_to_rms"] = _peak_to_rms(inputs[name].elements, *next(rows))
            self._weights[name] = figures
            self._histograms[name] = {}
            keep_worst(self._histograms, self._weights)
        self._fill_histograms(compared, inputs)

    def _fill_histograms(self, compared: Mapping[str, tuple[Tensor, Tensor]], inputs: Mapping[str, InputSample]) -> None:
        """Compute the histograms of those layers in ``compared`` that are among the worst so far."""
        pairs: dict[tuple[str, str], tuple[Tensor, Tensor | None]] = {}
        for name in (n for n in compared if n in self._histograms):
            pairs[name, "weight"] = compared[name]
            if name in inputs:
                pairs[name, "input"] = inputs[name].values, inputs[name].rounded
        if pairs:
            for (name, what), made in zip(pairs, histograms(list(pairs.values())), strict=True):
                if math.isfinite(made["low"]) and math.isfinite(made["high"]):
                    self._histograms[name][what] = made


def keep_worst(histograms: dict[str, dict[str, Any]], weights: Mapping[str, Mapping[str, Any]]) -> None:
    """Remove all histograms except those of the `WORST` layers with the lowest signal-to-noise ratios.

    ``weights`` has the metrics of each layer.
    """
    best_first = sorted(histograms, key=lambda name: _rank(weights[name]["snr_db"]), reverse=True)
    for name in best_first[: max(0, len(histograms) - WORST)]:
        del histograms[name]


def histograms(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> list[dict[str, Any]]:
    """Return two histograms for each pair of float values and rounded values.

    Both have the same `BINS` equal bins, over the range of all values of the pair. The host waits for the
    device twice.

    Returns:
        A dictionary for each pair. ``low`` and ``high`` are the ends of the range. ``float`` has the counts
        of the float values, and ``rounded`` those of the rounded values, or None without rounded values.
    """
    known = [[x.float() for x in pair if x is not None] for pair in pairs]
    ends = _on_host([torch.stack([end for x in parts for end in torch.aminmax(x)]) for parts in known])
    ranges = [(min(row), max(row) if max(row) > min(row) else min(row) + 1.0) for row in ends]
    # A range that is not finite has no bins.
    bins = [between if all(map(math.isfinite, between)) else (0.0, 1.0) for between in ranges]
    counts = [torch.histc(x, BINS, *between) for parts, between in zip(known, bins, strict=True) for x in parts]
    rows = iter([[int(count) for count in row] for row in _on_host(counts)])
    found = []
    for (_, rounded), (low, high) in zip(pairs, ranges, strict=True):
        found.append({"low": low, "high": high, "float": next(rows), "rounded": None if rounded is None else next(rows)})
    return found


def _on_host(vectors: Sequence[Tensor]) -> list[list[float]]:
    """Return the values of one or more float32 vectors. The host waits for the device only once."""
    values: list[float] = torch.cat(list(vectors)).tolist()
    ends = list(itertools.accumulate(len(vector) for vector in vectors))
    return [values[end - len(vector) : end] for end, vector in zip(ends, vectors, strict=True)]


def _extent(values: Tensor) -> Tensor:
    """Return the sum of squares, the smallest and the largest value, as a tensor ``[3]``."""
    return torch.stack([values.square().sum(), *torch.aminmax(values)])


def _peak_to_rms(elements: int, square_sum: float, low: float, high: float) -> float:
    rms = math.sqrt(square_sum / max(elements, 1))
    return max(-low, high) / rms if rms > 0 else 0.0


def _scale_sizes(qparams: QParams | None, device: torch.device) -> Tensor:
    """Return the largest and the median scale as float32 ``[2]``, or zeros if there is at most one scale.

    The median is that of a sample.
    """
    if qparams is None or qparams.scale.numel() < 2:
        return torch.zeros(2, device=device, dtype=torch.float32)
    scale = qparams.scale.detach().float().abs()
    return torch.stack([scale.max(), _sampled(scale, _SCALE_SAMPLE).median()])


def _compared(weight: Tensor, layer: QuantizedLayer, module: QuantizerModule) -> tuple[Tensor, Tensor]:
    """Return about `SAMPLE` elements of a float weight, and the same elements of the rounded weight.

    Both are float32 ``[n]``. If possible, the elements are those of whole rows. If the layer has scales but
    no rounded weight yet, these rows are rounded here, with the same result as for the whole weight.
    """
    rows = sample_of_rows(module.quantizer.granularity, tuple(weight.shape), SAMPLE)
    rounded: Tensor = layer.weight.detach()  # type: ignore[operator]
    if module.is_deferred or (rows is not None and rounded.shape == weight.shape):
        part = weight if rows is None else weight[rows]
        return part.float().reshape(-1), module.rows_of(rounded, rows).float().reshape(-1)
    return _sampled(weight, SAMPLE), _sampled(rounded, SAMPLE)


def _sampled(tensor: Tensor, most: int) -> Tensor:
    """Return about ``most`` elements of a tensor as float32 ``[n]``. Of a smaller tensor, return all.

    The elements are taken in runs of `_RUN` neighbours, because each single element would cost a cache line.
    """
    if tensor.numel() <= most:
        return tensor.float().reshape(-1)
    if tensor.is_contiguous():
        runs = tensor.view(-1)[: tensor.numel() // _RUN * _RUN].view(-1, _RUN)
        return runs.index_select(0, _spread(len(runs), max(1, most // _RUN), tensor.device)).float().reshape(-1)
    count = tensor.numel() // _RUN  # avoid the copy that reshaping a transposed view makes
    starts = _spread(count, max(1, most // _RUN), tensor.device) * _RUN
    places = (starts[:, None] + torch.arange(_RUN, device=tensor.device)).reshape(-1)
    matrix = tensor.reshape(tensor.shape[0], -1)
    return matrix[places // matrix.shape[1], places % matrix.shape[1]].float()


# Layers of one shape have the same indices.
@lru_cache(maxsize=64)
def _spread(count: int, most: int, device: torch.device) -> Tensor:
    """Divide the numbers below ``count`` into ``most`` equal parts, and return an index from each part.

    The position of the index in its part changes from part to part by the golden ratio. With a constant step
    between indices, all of them could fall into one column. If ``count`` is not larger than ``most``, return
    all indices.
    """
    if count <= most:
        return torch.arange(count, device=device)
    number = torch.arange(most, device=device, dtype=torch.float64)
    return ((number + (number * _GOLDEN_RATIO).frac()) * (count / most)).long().clamp_(max=count - 1)


def _rank(snr_db: float | None) -> float:
    """Return the sort key of a layer: its signal-to-noise ratio, or infinity for a layer without error."""
    return math.inf if snr_db is None else snr_db
