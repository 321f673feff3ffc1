"""Statistics of the inputs of balance layers, and the rounding errors of these inputs.

The statistics are a sample of the tokens, and the range of each channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from quark.algorithms import Statistic
from quark.config.layer import QLayerConfig
from quark.numbers import quantizer_for
from quark_algos.equalization.search import ActivationErrors

__all__ = ["BATCHES", "FEWEST", "SAMPLE", "ChannelRanges", "SampleOfSample", "TokenSample", "errors_of_inputs", "rounding_of_inputs"]

SAMPLE = 256
"""Number of tokens on which the rounding error of activations is measured."""
BATCHES = 8
"""Number of batches from which the sample is taken, so that no single text dominates."""
FEWEST = 32
"""Minimum number of sampled tokens per input.

This minimum is relevant for mappings with many inputs, such as mappings of experts.
"""


class TokenSample(Statistic):
    """A statistic that stores a sample of tokens in float32.

    From each batch, at most `SAMPLE` / `BATCHES` evenly spaced tokens are taken, until there are `SAMPLE`
    tokens.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self.value = torch.empty(0, columns, device=device, dtype=torch.float32)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        count = min(SAMPLE - len(self.value), SAMPLE // BATCHES)
        self.value = torch.cat((self.value, x[:: max(1, len(x) // max(count, 1))][:count].float()))

    def add(self, other: TokenSample) -> None:
        self.value = torch.cat((self.value, other.value))[:SAMPLE]


class SampleOfSample(TokenSample):
    """A `TokenSample` that uses only a quarter of the calibration tokens."""

    one_in: ClassVar[int] = 4


class ChannelRanges(Statistic):
    """A statistic with the smallest and the largest value of each input channel, ``[2, K]``, float32."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self.range = torch.tensor([[torch.inf], [-torch.inf]], dtype=torch.float32, device=device).repeat(1, columns)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self._widen(torch.stack((x.amin(0), x.amax(0))).float())

    def add(self, other: ChannelRanges) -> None:
        self._widen(other.range)

    def _widen(self, other: Tensor) -> None:
        self.range = torch.stack((torch.minimum(self.range[0], other[0]), torch.maximum(self.range[1], other[1])))

    @property
    def value(self) -> Tensor:
        """The largest magnitude of each channel, ``[K]``."""
        return self.range.abs().amax(0)


def errors_of_inputs(config: QLayerConfig, sample: TokenSample, ranges: ChannelRanges | None, parts: int) -> ActivationErrors:
    """Return an object that computes the rounding errors of a balance layer's inputs.

    Args:
        config: The configuration of the layer.
        sample: A sample of the tokens. The more parts a mapping has, the fewer tokens of the sample are used
            for each part.
        ranges: The ranges over all tokens. If it is None, the ranges of the sample are used.
        parts: Number of parts of the mapping.
    """
    of_all = torch.stack(torch.aminmax(sample.value, dim=0)) if ranges is None else ranges.range
    return ActivationErrors(sample.value[:: min(parts, SAMPLE // FEWEST)], of_all, rounding_of_inputs(config))


def rounding_of_inputs(config: QLayerConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that rounds a sample of a layer's inputs ``[T, K]`` in the same way as the quantized
    layer.

    The second argument of the function is the range over all tokens, ``[2, K]``. A static scale is computed
    from this range if the scale's observer needs only the smallest and the largest value. With any other
    observer, the static scale is computed from the sample.
    """
    if config.input_tensors is None:
        return lambda x, _: x
    quantizer = quantizer_for(config.input_tensors, activation=True)

    def round_(x: Tensor, ranges: Tensor) -> Tensor:
        if quantizer.is_float or quantizer.is_dynamic:
            return quantizer.fake_quantize(x)
        observer = quantizer.observer()
        observer.observe(ranges if observer.is_extremes else x)
        return quantizer.fake_quantize(x, quantizer.qparams_from(observer))

    return round_
