"""Dequantizers: they compute the float tensors of a quantized checkpoint from its codes.

A third party implements `Dequantizer` and names the class as ``dequantizer`` of an `ExporterRecord`, whose
``quant_methods`` and ``marks`` select checkpoints. The core does the rest: it reads the stored tensors of
each block when they are needed, and applies weight converters and transformers' conversions to the float
tensors.
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
    """How a linear layer is quantized in a checkpoint.

    A run that keeps the layer writes exactly this quantization.

    Attributes:
        name: Its full name, as in a float checkpoint. A layer of a fused expert has the expert's number,
            ``experts.3.down_proj``.
        config: Quantization of its weight and input.
        shape: Shape of its weight, ``[O, I]``.
        read: Returns its codes and scales. The argument holds the stored tensors in ``sources`` and
            ``left_out`` of its `FloatTensor`, by full name.
    """

    name: str
    config: QLayerConfig
    shape: tuple[int, ...] = attrs.field(converter=_tuple)
    read: Callable[[Mapping[str, Tensor]], CodedLayer]


@attrs.frozen(kw_only=True, eq=False)
class FloatTensor:
    """A float tensor that is computed from stored tensors.

    Attributes:
        name: Its full name, as in a float checkpoint of the same model.
        shape: Its shape.
        sources: Full names of the stored tensors that it is computed from, codes first.
        make: Computes it. The arguments are the sources by full name, all on one device, and the dtype of the
            result.
        left_out: Full names of stored tensors that belong to it but are not needed, such as the scale of its
            layer's input.
        layers: The linear layers whose weight it is, or whose weights are parts of it, each with its codes.
            Empty if a `QLayerConfig` cannot express their quantization exactly: such layers are dequantized,
            even if a run would keep them.
    """

    name: str
    shape: tuple[int, ...] = attrs.field(converter=_tuple)
    sources: tuple[str, ...] = attrs.field(converter=_tuple)
    make: Callable[[Mapping[str, Tensor], torch.dtype], Tensor]
    left_out: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    layers: tuple[LayerCodes, ...] = attrs.field(default=(), converter=_tuple)


class Dequantizer(Protocol):
    """Says which float tensors a quantized checkpoint represents.

    Implementations are classes that are called without arguments.
    """

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterable[FloatTensor]:
        """Yield every float tensor that must be computed.

        Tensors that are in no ``sources`` are used as stored.

        Args:
            block: The ``quantization_config`` of the checkpoint, not validated: any value may have any type.
            stored: All tensors of the checkpoint by full name, on the meta device.

        Raises:
            CheckpointError: Scales are missing, or do not have the shape that their codes need.
            ConfigError, UnsupportedError: The block cannot be used.
        """


class DequantizedTensors:
    """The float tensors of a quantized checkpoint, computed from codes and scales on reading.

    Args:
        files: The tensors as stored.
        float_tensors: The tensors to compute, from a `quark.models.hf.dequantizer.Dequantizer`.
        directory: The checkpoint, for messages.

    Attributes:
        meta: As in `quark.models.hf.file_tensors.TensorFiles`.

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
            raise CheckpointError(f"'{directory}' has {folded(twice)} twice, quantized and unquantized: fetch or make it again")
        if absent := sorted(used - files.meta.keys()):
            raise CheckpointError(f"'{directory}' lacks {folded(absent)}, which its quantized weights need: fetch it again")
        if codes := [name for name, tensor in stays.items() if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1]:
            raise CheckpointError(
                f"'{directory}' holds {folded(codes)} as codes of 8 bits, but no scales for them: it is incomplete, or its layout differs "
                "from its quantization_config"
            )
        self.meta: dict[str, Tensor] = stays | {
            one.name: torch.empty(one.shape, dtype=torch.float32, device="meta") for one in self._made.values()
        }

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[ReadTensor]:
        """As `quark.models.hf.file_tensors.TensorFiles.reading`.

        Raises:
            CheckpointError: A file has changed or cannot be read, or its codes and scales do not fit each
                other.
        """
        with self._files.reading(device) as stored:
            yield lambda name, dtype: self._read(name, dtype, stored)

    def _read(self, name: str, dtype: torch.dtype, stored: Callable[[str, torch.dtype], Tensor]) -> Tensor:
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
                f"{list(made.shape)}: the checkpoint is damaged"
            )
        return values
