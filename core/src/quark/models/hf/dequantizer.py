"""Classes for dequantizers. A dequantizer describes how the float tensors of a quantized checkpoint are
computed from its codes.

A plugin implements `Dequantizer` and names the class as ``dequantizer`` of an `ExporterRecord`. The fields
``quant_methods`` and ``marks`` of the record select the checkpoints for which the dequantizer is used. The
core reads the stored tensors of each decoder block when they are needed. It then applies weight converters
and the conversions of transformers to the float tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from quark.base.names import folded
from quark.config.layer import QLayerConfig
from quark.errors import CheckpointError
from quark.models.hf.file_tensors import FileTensors, ReadTensor
from quark.models.layers.coded_layer import CodedLayer


def _tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True, eq=False)
class LayerCodes:
    """The quantization of a linear layer in a checkpoint.

    If a run keeps the quantization of the layer, it exports exactly these codes and scales.

    Attributes:
        name: Full name of the layer, as in a float checkpoint. The name of a layer of a fused expert contains
            the number of the expert, as in ``experts.3.down_proj``.
        config: Quantization of the weight and the input.
        shape: Shape of the weight. It is ``[out, in]``.
        read: A function that returns the codes and scales of the layer. Its argument is a dictionary from
            full name to stored tensor, with all tensors in ``sources`` and ``left_out`` of the `FloatTensor`.
    """

    name: str
    config: QLayerConfig
    shape: tuple[int, ...] = attrs.field(converter=_tuple)
    read: Callable[[Mapping[str, Tensor]], CodedLayer]


@attrs.frozen(kw_only=True, eq=False)
class FloatTensor:
    """A description of a float tensor and of its computation from stored tensors.

    Attributes:
        name: Full name of the float tensor, as in a float checkpoint of the same model.
        shape: Shape of the float tensor.
        sources: Full names of the stored tensors that the computation needs. The codes come first.
        make: A function that computes the float tensor. Its arguments are a dictionary from full name to
            source, with all sources on one device, and the dtype of the result.
        left_out: Full names of stored tensors that belong to the float tensor, but are not needed to compute
            it. An example is the scale of the input of the layer.
        layers: The `LayerCodes` of each linear layer whose weight is this tensor or a part of this tensor.
            The sequence is empty if no `QLayerConfig` expresses the quantization exactly. Such layers are
            dequantized even if a run would keep their quantization.
    """

    name: str
    shape: tuple[int, ...] = attrs.field(converter=_tuple)
    sources: tuple[str, ...] = attrs.field(converter=_tuple)
    make: Callable[[Mapping[str, Tensor], torch.dtype], Tensor]
    left_out: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    layers: tuple[LayerCodes, ...] = attrs.field(default=(), converter=_tuple)


class Dequantizer(Protocol):
    """The protocol of objects that describe the float tensors of a quantized checkpoint.

    quark calls the class of such an object without arguments.
    """

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterable[FloatTensor]:
        """Yield a `FloatTensor` for every float tensor that must be computed.

        A stored tensor that is not in the ``sources`` or the ``left_out`` of any `FloatTensor` is used
        unchanged.

        Args:
            block: The ``quantization_config`` of the checkpoint. It has not been validated, so values may
                have any type.
            stored: A dictionary from full name to tensor, on the meta device, for all tensors of the
                checkpoint.

        Raises:
            CheckpointError: Scales are missing, or do not have the shape that their codes need.
            ConfigError: ``block`` is not valid.
            UnsupportedError: ``block`` is valid, but quark cannot dequantize such a checkpoint.
        """


class DequantizedTensors:
    """The `TensorFiles` of a quantized checkpoint. They compute float tensors from codes and scales.

    Args:
        files: The stored tensors.
        float_tensors: The tensors to compute, from a `quark.models.hf.dequantizer.Dequantizer`.
        directory: The checkpoint directory. Messages name it.

    Attributes:
        meta: A dictionary from full name to a meta tensor with the shape of the float or stored tensor.

    Raises:
        CheckpointError: A tensor would occur twice, is computed from missing tensors, or is stored as codes
            without scales.
    """

    def __init__(self, files: FileTensors, float_tensors: Sequence[FloatTensor], directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._made = {one.name: one for one in float_tensors}
        used = {name for one in float_tensors for name in (*one.sources, *one.left_out)}
        stays = {name: tensor for name, tensor in files.meta.items() if name not in used}
        twice = [one.name for one in float_tensors if one.name in stays or self._made[one.name] is not one]
        if twice:
            raise CheckpointError(f"'{directory}' has {folded(twice)} twice, quantized and unquantized. Make or fetch the checkpoint again")
        if absent := sorted(used - files.meta.keys()):
            raise CheckpointError(f"'{directory}' lacks {folded(absent)}, which its quantized weights need. Fetch the checkpoint again")
        if codes := [name for name, tensor in stays.items() if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1]:
            raise CheckpointError(
                f"'{directory}' holds {folded(codes)} as codes of 8 bits, but no scales for them. It is incomplete, or its layout differs "
                "from its quantization_config. Fetch the checkpoint again"
            )
        self.meta: dict[str, Tensor] = stays | {
            one.name: torch.empty(one.shape, dtype=torch.float32, device="meta") for one in self._made.values()
        }

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[ReadTensor]:
        """Do as `quark.models.hf.file_tensors.TensorFiles.reading` says.

        Raises:
            CheckpointError: A file has changed or cannot be read, or codes and scales do not fit each other.
        """
        with self._files.reading(device) as stored:
            yield lambda name, dtype: self._read(name, dtype, stored)

    def _read(self, name: str, dtype: torch.dtype, stored: Callable[[str, torch.dtype], Tensor]) -> Tensor:
        """Return the tensor ``name``, computed from codes and scales if it is quantized in the checkpoint."""
        made = self._made.get(name)
        if made is None:
            return stored(name, dtype)
        tensors = {source: stored(source, dtype) for source in made.sources}
        try:
            values = made.make(tensors, dtype)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"'{name}' cannot be computed from {folded(made.sources)} of '{self._directory}' ({error})") from error
        if tuple(values.shape) != made.shape:
            raise CheckpointError(
                f"{folded(made.sources)} of '{self._directory}' give '{name}' the shape {list(values.shape)}, but their headers give "
                f"{list(made.shape)}. The checkpoint is damaged: fetch it again"
            )
        return values
