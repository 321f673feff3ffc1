"""Tuning: changes codes, scales, norms and biases of a rounded block.

The block's output then comes closer to the float block's output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms.rounding import Metrics, StackedWeights
from quark.algorithms.validation import channel_factors
from quark.models.layers import QuantizedLayer


@attrs.frozen(eq=False)
class Sample:
    """One calibration call at a block, with the wanted output of the block.

    Attributes:
        number: Number of the call.
        target: Output of the float block for its tokens, ``[tokens, channels]``, in the model's dtype.
        is_held_out: Which of these tokens must not be used for fitting, bool, ``[tokens]``.
    """

    number: int
    target: Tensor
    is_held_out: Tensor


@attrs.frozen(eq=False)
class RoundedBlock:
    """One block whose weights are rounded and whose activations have their scales. Names are relative to it.

    Attributes:
        name: Full name of the block.
        layers: Its linear layers with rounded weights, in order. `weights` gives their codes and grids, and
            sets new ones.
        float_weights: Their weights before rounding, ``[out, in]``.
        parameters: Its float parameters: norm weights, and biases that stay float. You may change their
            values in place.
        samples: Calibration calls, in order. Held-out tokens are at the end of a call.
        output: Computes the block's present output for a sample, ``[tokens, channels]``, with gradients if
            they are enabled. Gradients pass straight through the rounding of activations. The second argument
            is the dtype of products, such as ``torch.bfloat16``; None means the model's own.
        substituted: Returns a context in which tensors replace parameters, by name
            (``"mlp.up_proj.weight"``). They may be results of a computation with gradients, and of another
            dtype.
        weights: Returns the rounded weights of one layer as a matrix with their grid.
    """

    name: str
    layers: Mapping[str, QuantizedLayer]
    float_weights: Mapping[str, Tensor]
    parameters: Mapping[str, nn.Parameter]
    samples: Sequence[Sample]
    output: Callable[[Sample, torch.dtype | None], Tensor]
    substituted: Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]

    @cached_property
    def channels(self) -> Tensor:
        """Factors of output channels, ``[channels]``, for comparing outputs with targets."""
        return channel_factors(sample.target for sample in self.samples)

    def weights(self, layer: str) -> StackedWeights:
        """Return the rounded weight of a layer as `StackedWeights`.

        Its ``keep`` gives the layer other codes and scales.
        """
        return StackedWeights({layer: self.layers[layer]})


class Tuning(ABC):
    """Changes the codes and scales of a rounding, by the output of the whole block.

    A subclass defines `tune`.

    A run has any number of tunings. Each is applied to a block after all of its weights are rounded and
    before calibration continues to the next block. Their records determine the order
    (`quark.plugins.AlgorithmRecord`).

    Attributes:
        wants_float: Whether targets are outputs of the float model, which needs a second forward of each
            call. Otherwise they are the float block's outputs on the quantized model's hidden states.
    """

    wants_float: bool = False

    @abstractmethod
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        """Change codes and scales of the layers' weights, and values of the float parameters.

        Return a dictionary from layer name to metrics. The key ``""`` has the metrics of the whole block.

        Nothing else of the block may change. The pipeline computes the error of the block's output on
        held-out tokens before and after (`OutputError`, with the factors ``block.channels``). If the error
        has not decreased, the pipeline undoes the change. The result must not depend on any state of the
        program, such as unseeded random numbers.
        """
