"""The tensors of a quantized checkpoint as a float checkpoint has them.

They are computed from codes and scales when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from quark.base.names import folded
from quark.errors import CheckpointError
from quark.models.hf.dequantizer import FloatTensor
from quark.models.hf.file_tensors import FileTensors, ReadTensor

__all__ = ["DequantizedTensors"]


class DequantizedTensors:
    """Tensors of a quantized checkpoint, float.

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
