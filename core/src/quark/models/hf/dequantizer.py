"""Dequantizers: the float tensors that a quantized checkpoint stands for, and how they are read.

Third parties implement `Dequantizer` and name the class as ``dequantizer`` of an `ExporterRecord`, whose
``quant_methods`` and ``marks`` say which checkpoints it is for. The core does the rest: it reads the stored
tensors of a block when the block's turn comes, and applies weight converters and the conversions of
transformers to the float tensors.
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


class DequantizedTensors:
    """Tensors of a quantized checkpoint, float: they are computed from codes and scales when they are read.

    Args:
        files: The tensors as they are stored.
        float_tensors: Those that are computed, from a `quark.models.hf.dequantizer.Dequantizer`.
        directory: Of the checkpoint, for messages.

    Attributes:
        meta: As of `quark.models.hf.file_tensors.TensorFiles`.

    Raises:
        CheckpointError: A tensor would be there twice, is made of tensors that are not there, or is stored as
            codes without scales.
    """

    def __init__(self, files: FileTensors, float_tensors: Sequence[FloatTensor], directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._made = {one.name: one for one in float_tensors}
        used = {name for one in float_tensors for name in (*one.sources, *one.left_out)}
        stays = {name: tensor for name, tensor in files.meta.items() if name not in used}
        twice = [one.name for one in float_tensors if one.name in stays or self._made[one.name] is not one]
        if twice:
            raise CheckpointError(f"'{directory}' has {folded(twice)} twice, quantized and as it is: it is unclear which one is right")
        if absent := sorted(used - files.meta.keys()):
            raise CheckpointError(f"'{directory}' lacks {folded(absent)}, which its quantized weights need: fetch it again")
        if codes := [name for name, tensor in stays.items() if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1]:
            raise CheckpointError(
                f"'{directory}' holds {folded(codes)} as codes of 8 bits, and no scales for them: it is incomplete, or of another layout "
                "than its quantization_config says"
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
                f"{folded(made.sources)} of '{self._directory}' make '{name}' of the shape {list(values.shape)}, and {list(made.shape)} "
                "follows from their headers: the checkpoint is damaged"
            )
        return values
