"""Write safetensors in a stream: two parts at a time are in memory, whatever the size of the model.

Sizes are known beforehand from meta tensors, so headers are written first and data follow as they are made.
Source: the safetensors format, version 0.4.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import attrs
import torch
from torch import Tensor

from quark.errors import UnsupportedError
from quark.model.shards import INDEX, SINGLE

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Torch dtype → its name in a safetensors header."""


@attrs.frozen(eq=False)
class Part:
    """Tensors that are made together, such as those of one layer; a part is never split over two files.

    Attributes:
        meta: Meta tensors by full name: shapes and dtypes, known before anything is made.
        make: Makes them, under the same names.
    """

    meta: Mapping[str, Tensor]
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.meta.values())


def write_shards(parts: Sequence[Part], directory: Path, max_shard_bytes: int) -> None:
    """Write ``model.safetensors``, or several shards and their index where one file would be too large.

    Raises:
        UnsupportedError: A dtype has no name in the format.
        OSError: From the file system; with ``ENOSPC`` before anything is made where the tensors cannot fit.
    """
    _refuse_small_disk(sum(p.size for p in parts), directory)
    shards = _shards(parts, max_shard_bytes)
    if len(shards) == 1:
        _write_file(shards[0], directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_file(shard, directory / name)
        weight_map |= {tensor: name for part in shard for tensor in part.meta}
    index = {"metadata": {"total_size": sum(p.size for p in parts)}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _refuse_small_disk(size: int, directory: Path) -> None:
    if size > shutil.disk_usage(directory).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def _shards(parts: Sequence[Part], limit: int) -> list[list[Part]]:
    shards: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        if shards[-1] and size + part.size > limit:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.size
    return shards


def _write_file(parts: Sequence[Part], path: Path) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for part in parts:
        for name, tensor in part.meta.items():
            if tensor.dtype not in NAMES:
                raise UnsupportedError(
                    f"'{name}' is of {tensor.dtype}, which safetensors cannot hold: quantize it, or convert the model first"
                )
            end = offset + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file, ThreadPoolExecutor(max_workers=1) as writer:
        file.write(len(text).to_bytes(8, "little") + text)
        # While one part goes to the file the next is made: two are in memory at most.
        written = writer.submit(lambda: None)
        for part in parts:
            made = _make(part)
            written.result()
            written = writer.submit(_write_part, made, file)
        written.result()


def _make(part: Part) -> list[Tensor]:
    """The bytes of a part's tensors, in the order in which they were announced."""
    made = part.make()
    found = []
    for name, expected in part.meta.items():
        tensor = made[name]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise RuntimeError(
                f"'{name}' was announced as {expected.dtype}{list(expected.shape)} and made as {tensor.dtype}{list(tensor.shape)}"
            )
        found.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
    return found


def _write_part(tensors: Sequence[Tensor], file: BinaryIO) -> None:
    for tensor in tensors:
        file.write(tensor.numpy().data)
