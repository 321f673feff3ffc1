"""Interface of dequantizers: the float tensors that a quantized checkpoint stands for.

Third parties implement `Dequantizer` and name the class as ``dequantizer`` of an `ExporterRecord`, whose
``quant_methods`` and ``marks`` say which checkpoints it is for. The core does the rest: it reads the stored
tensors of a block when the block's turn comes, and applies weight converters and the conversions of
transformers to the float tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from quark.config.layer import QLayerConfig
from quark.models.layers.coded_layer import CodedLayer

__all__ = ["Dequantizer", "FloatTensor", "LayerCodes"]


def _tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True, eq=False)
class LayerCodes:
    """How a linear layer is quantized in a checkpoint.

    It can be written again exactly so, where a run leaves it as it is.

    Attributes:
        name: Its full name, as in a float checkpoint; that of a fused expert's layer has the expert's number,
            ``experts.3.down_proj``.
        config: How its weight and input are quantized.
        shape: Of its weight, ``[O, I]``.
        read: Returns its codes and scales: of the tensors in ``sources`` and ``left_out`` of its
            `FloatTensor` by full name.
    """

    name: str
    config: QLayerConfig
    shape: tuple[int, ...] = attrs.field(converter=_tuple)
    read: Callable[[Mapping[str, Tensor]], CodedLayer]


@attrs.frozen(kw_only=True, eq=False)
class FloatTensor:
    """One float tensor that is computed from stored ones.

    Attributes:
        name: Its full name, as in a float checkpoint of the same model.
        shape: Its shape.
        sources: Full names of the stored tensors that it is computed from, codes first.
        make: Computes it: of the sources by full name, all on one device, and the dtype that it is to have.
        left_out: Full names of stored tensors that belong to it and are not needed, such as the scale of its
            layer's input.
        layers: The linear layers whose weight it is, or whose weights are parts of it, each with its codes.
            Empty where their quantization has no exact expression as a `QLayerConfig`: such layers are
            dequantized, also where a run would leave them as they are.
    """

    name: str
    shape: tuple[int, ...] = attrs.field(converter=_tuple)
    sources: tuple[str, ...] = attrs.field(converter=_tuple)
    make: Callable[[Mapping[str, Tensor], torch.dtype], Tensor]
    left_out: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    layers: tuple[LayerCodes, ...] = attrs.field(default=(), converter=_tuple)


class Dequantizer(Protocol):
    """Says which float tensors a quantized checkpoint stands for.

    Implementations are classes that are called without arguments.
    """

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterable[FloatTensor]:
        """Yield every float tensor that has to be computed.

        Tensors that are in no ``sources`` are used as they are stored.

        Args:
            block: The ``quantization_config`` of the checkpoint, not validated: any value may have any type.
            stored: All tensors of the checkpoint by full name, on the meta device.

        Raises:
            CheckpointError: Scales are missing, or have another shape than their codes need.
            ConfigError, UnsupportedError: The block cannot be used.
        """
