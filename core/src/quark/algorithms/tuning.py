"""A tuning changes codes, scales, norms and biases of a rounded block.

The output of the block then comes closer to the output of the float block.
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
    """One calibration call of a block, with the output that the block should have.

    Attributes:
        number: Number of the call.
        target: Output of the float block, ``[tokens, channels]``, in the dtype of the model.
        is_held_out: A bool for each token, ``[tokens]``. If the bool is True, do not use the token for
            fitting.
    """

    number: int
    target: Tensor
    is_held_out: Tensor


@attrs.frozen(eq=False)
class RoundedBlock:
    """One block whose weights are rounded and whose activations have scales.

    Names of layers and parameters are relative to the block.

    Attributes:
        name: Full name of the block.
        layers: Mapping from name to linear layer. It contains the layers with rounded weights, in the order
            of the block. The method `weights` gives access to the codes and the grid of a layer.
        float_weights: Mapping from the name of a layer to the layer's weight before rounding, ``[out, in]``.
        parameters: Mapping from name to float parameter of the block. The parameters are the weights of
            norms, and biases that stay float. You may change their values in place.
        samples: Calibration calls, in order. The last tokens of each sequence are held out.
        output: Function that computes the current output of the block for a sample, ``[tokens, channels]``.
            If gradients are enabled, the output has gradients. The gradients of rounded activations are then
            straight-through estimates. The second argument is the dtype of matrix products, such as
            ``torch.bfloat16``. None means the dtype of the model.
        substituted: Function that returns a context manager. The argument maps names of parameters, such as
            ``"mlp.up_proj.weight"``, to tensors. In the ``with`` block, the tensors replace the parameters.
            They may require gradients, and may have another dtype than the parameters.
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
        """Factors ``[channels]`` by which outputs and targets are multiplied before they are compared."""
        return channel_factors(sample.target for sample in self.samples)

    def weights(self, layer: str) -> StackedWeights:
        """Return the rounded weight of a layer as `StackedWeights`.

        To set other codes and scales of the layer, call `StackedWeights.keep`.
        """
        return StackedWeights({layer: self.layers[layer]})


class Tuning(ABC):
    """Changes codes and scales of a rounded block, to reduce the output error of the whole block.

    A subclass defines `tune`.

    A run can have several tunings. It applies each of them to a block after all weights of the block are
    rounded, and before calibration continues with the next block. The records of the tunings determine their
    order (`quark.plugins.AlgorithmRecord`).

    Attributes:
        wants_float: Whether the targets are outputs of the float model. A run then needs a second forward
            pass for each call. If False, the targets are the outputs of the float block for the hidden states
            of the quantized model.
    """

    wants_float: bool = False

    @abstractmethod
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        """Change codes and scales of weights, and the values of float parameters. Return metrics.

        The result maps the name of a layer to metrics. The key ``""`` is for metrics of the whole block. Do
        not change other parts of the block. A run computes the error of the block's output on held-out tokens
        before and after this method (`OutputError`, with the factors ``block.channels``). If the error has
        not decreased, the run undoes the change. The result must not depend on the state of the program, such
        as the state of torch's random number generator.
        """
