"""`ShardLayout`, which describes the files of a checkpoint, their headers, and the place of each tensor.

A layout is computed from meta tensors before the tensors exist, so that the header of a file can be written
before the tensors. Source: the safetensors format, version 0.4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Self

import attrs
from torch import Tensor

from quark.errors import UnsupportedError
from quark.models.hf.shards import DTYPES, INDEX, SINGLE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@attrs.frozen(eq=False)
class Place:
    """The place of a tensor in the files of a checkpoint.

    Attributes:
        file: Index of the file in `ShardLayout.files`.
        offset: Position of the first byte of the tensor in that file.
        meta: A meta tensor with the shape and dtype of the tensor.
    """

    file: int
    offset: int
    meta: Tensor

    @property
    def size(self) -> int:
        """The number of bytes of the tensor."""
        return _bytes(self.meta)


@attrs.frozen(eq=False, slots=False)
class ShardLayout:
    """The files of a checkpoint: ``model.safetensors``, or several files if one file would be too large.

    Attributes:
        headers: A dictionary from file name to the bytes before the data of the file. These bytes include the
            length of the header. The dictionary is in the order of the files.
        places: A dictionary from the full name of a tensor to the tensor's place.
    """

    headers: Mapping[str, bytes]
    places: Mapping[str, Place]

    @classmethod
    def of(cls, announced: Iterable[Mapping[str, Tensor]], max_shard_bytes: int) -> Self:
        """Return the layout of tensors that are announced in parts. The files are in the order of the parts.

        All tensors of a part are in the same file.

        Args:
            announced: For each part, a dictionary from full name to meta tensor.
            max_shard_bytes: Largest number of bytes of the tensors in one file. A part with more bytes gets a
                file of its own.

        Raises:
            UnsupportedError: Safetensors files cannot store the dtype of a tensor.
        """
        shards = _shards(list(announced), max_shard_bytes)
        headers = [_header(shard) for shard in shards]
        places: dict[str, Place] = {}
        for i, (shard, header) in enumerate(zip(shards, headers, strict=True)):
            offset = len(header)
            for name, meta in ((n, t) for part in shard for n, t in part.items()):
                places[name] = Place(i, offset, meta)
                offset += _bytes(meta)
        count = len(shards)
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        return cls(dict(zip(names, headers, strict=True)), places)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The names of the files, in order."""
        return tuple(self.headers)

    @property
    def size(self) -> int:
        """The number of bytes of all tensors."""
        return sum(place.size for place in self.places.values())

    def file_sizes(self) -> dict[str, int]:
        """Return a dictionary from file name to number of bytes. It includes the index file, if any."""
        sizes = {name: len(header) for name, header in self.headers.items()}
        for place in self.places.values():
            sizes[self.files[place.file]] += place.size
        index = self.index()
        return sizes if index is None else {**sizes, INDEX: len(index.encode())}

    @cached_property
    def names_under(self) -> Mapping[str, list[str]]:
        """A dictionary from the full name of a module to the names of the module's tensors.

        The names of tensors are relative to the module.
        """
        names: dict[str, list[str]] = {}
        for owner, _, name in (place.rpartition(".") for place in self.places):
            names.setdefault(owner, []).append(name)
        return names

    def index(self) -> str | None:
        """Return the text of the index file, or None if there is only one file, which needs no index."""
        if len(self.files) == 1:
            return None
        weight_map = {name: self.files[place.file] for name, place in sorted(self.places.items())}
        return json.dumps({"metadata": {"total_size": self.size}, "weight_map": weight_map}, indent=2) + "\n"


def _bytes(tensor: Tensor) -> int:
    """Return the number of bytes of a tensor, which may be a meta tensor."""
    return tensor.numel() * tensor.element_size()


def _shards(parts: Sequence[Mapping[str, Tensor]], limit: int) -> list[list[Mapping[str, Tensor]]]:
    """Distribute parts to files, and return a list of parts for each file.

    A file with several parts has at most ``limit`` bytes.
    """
    shards: list[list[Mapping[str, Tensor]]] = [[]]
    size = 0
    for part in parts:
        own = sum(_bytes(tensor) for tensor in part.values())
        if shards[-1] and size + own > limit:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += own
    return shards


def _header(parts: Sequence[Mapping[str, Tensor]]) -> bytes:
    """Return the bytes before the data of a file. They are the length of the header and the header itself."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ((n, t) for part in parts for n, t in part.items()):
        if tensor.dtype not in _NAMES:
            raise UnsupportedError(f"'{name}' has the dtype {tensor.dtype}, which safetensors cannot hold. Quantize or convert it first")
        end = offset + _bytes(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
