"""ShardLayout: the files of a checkpoint, their headers, and the place of each tensor in them.

All of it is known before any tensor exists.

Sizes are known beforehand from meta tensors, so that headers can be written first. Source: the safetensors
format, version 0.4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Self

import attrs
import torch
from torch import Tensor

from quark.errors import UnsupportedError
from quark.models.hf.shards import INDEX, SINGLE

__all__ = ["NAMES", "Place", "ShardLayout"]

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
class Place:
    """The place of a tensor in the files of a checkpoint.

    Attributes:
        file: Position of its file in `ShardLayout.files`.
        offset: Of its first byte in that file.
        meta: A meta tensor of its shape and dtype.
    """

    file: int
    offset: int
    meta: Tensor

    @property
    def size(self) -> int:
        """The number of its bytes."""
        return _bytes(self.meta)


@attrs.frozen(eq=False, slots=False)
class ShardLayout:
    """The files of a checkpoint: ``model.safetensors``, or several where one would be too large.

    Attributes:
        headers: The bytes before the data, the length of the header among them, by file name, in the order of
            the files.
        places: Where each tensor lies, by full name.
    """

    headers: Mapping[str, bytes]
    places: Mapping[str, Place]

    @classmethod
    def of(cls, announced: Iterable[Mapping[str, Tensor]], max_shard_bytes: int) -> Self:
        """Return the layout of tensors that are announced part by part, in the order of the files.

        No part is split over two files.

        Args:
            announced: Meta tensors by full name, for each part.
            max_shard_bytes: Largest size of the tensors in one file; a larger part has a file of its own.

        Raises:
            UnsupportedError: A dtype has no name in the format.
        """
        shards = _shards(list(announced), max_shard_bytes)
        headers = [_header(shard) for shard in shards]
        places: dict[str, Place] = {}
        for i, (shard, header) in enumerate(zip(shards, headers, strict=True)):
            offset = len(header)
            for name, meta in ((n, t) for part in shard for n, t in part.items()):
                places[name] = Place(i, offset, meta)
                offset += _bytes(meta)
        return cls(dict(zip(_file_names(len(shards)), headers, strict=True)), places)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The names of the files, in order."""
        return tuple(self.headers)

    @property
    def size(self) -> int:
        """The number of bytes of all tensors."""
        return sum(place.size for place in self.places.values())

    def file_sizes(self) -> dict[str, int]:
        """Return the number of bytes of each file, that of the index among them, by name."""
        sizes = {name: len(header) for name, header in self.headers.items()}
        for place in self.places.values():
            sizes[self.files[place.file]] += place.size
        index = self.index()
        return sizes if index is None else {**sizes, INDEX: len(index.encode())}

    @cached_property
    def names_under(self) -> Mapping[str, list[str]]:
        """The names of tensors without their module's, by its full name, in the order of the files."""
        names: dict[str, list[str]] = {}
        for owner, _, name in (place.rpartition(".") for place in self.places):
            names.setdefault(owner, []).append(name)
        return names

    def index(self) -> str | None:
        """Return the text of the index that readers of several files need; None for a single file."""
        if len(self.files) == 1:
            return None
        weight_map = {name: self.files[place.file] for name, place in sorted(self.places.items())}
        return json.dumps({"metadata": {"total_size": self.size}, "weight_map": weight_map}, indent=2) + "\n"


def _file_names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size(part: Mapping[str, Tensor]) -> int:
    return sum(_bytes(t) for t in part.values())


def _shards(parts: Sequence[Mapping[str, Tensor]], limit: int) -> list[list[Mapping[str, Tensor]]]:
    shards: list[list[Mapping[str, Tensor]]] = [[]]
    size = 0
    for part in parts:
        if shards[-1] and size + _size(part) > limit:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += _size(part)
    return shards


def _header(parts: Sequence[Mapping[str, Tensor]]) -> bytes:
    """Return the bytes before the data in a file: the header and its length."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ((n, t) for part in parts for n, t in part.items()):
        if tensor.dtype not in NAMES:
            raise UnsupportedError(f"'{name}' is of {tensor.dtype}, which safetensors cannot hold: quantize it, or convert the model first")
        end = offset + _bytes(tensor)
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
