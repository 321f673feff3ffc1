"""Streamed writing of safetensors files: at most two parts are in memory, whatever the size of the model.

Sizes are known beforehand from meta tensors, so all headers are written first, which fixes the offset of every tensor, and parts may be
written in any order. Source: the safetensors format, version 0.4.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs
import torch
from torch import Tensor

from quark.errors import UnsupportedError
from quark.hf.shards import INDEX, SINGLE
from quark.names import folded

__all__ = ["NAMES", "Part", "ShardWriter", "write_shards"]

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
    """Tensors that are computed together, such as those of one layer; a part is never split over two files.

    Attributes:
        meta: Meta tensors by full name: shapes and dtypes, known in advance.
        make: Returns the tensors, under the same names.
    """

    meta: Mapping[str, Tensor]
    make: Callable[[], Mapping[str, Tensor]]


def write_shards(parts: Sequence[Part], directory: Path, max_shard_bytes: int) -> None:
    """Write all parts in their order; raises as `ShardWriter`."""
    with ShardWriter([part.meta for part in parts], directory, max_shard_bytes) as writer:
        for part in parts:
            writer.write(part)
        writer.finish()


@attrs.frozen(eq=False)
class _Place:
    """The file of a tensor, the offset of its first byte, and its meta tensor."""

    file: int
    offset: int
    meta: Tensor


class ShardWriter:
    """``model.safetensors``, or several shards and their index where one file would be too large, filled part by part.

    The announced tensors fix the layout of the files; the order of writing does not matter. The context manager closes the files.

    Args:
        announced: Meta tensors by full name, for each part; the order is that of the files.
        directory: The output directory, which exists.
        max_shard_bytes: Largest size of the tensors in one file; a larger part has a file of its own.
        is_new: Whether the files are to be created; else another process has done so, and writes to them too.

    Raises:
        UnsupportedError: A dtype has no name in the format.
        OSError: From the file system; with ``ENOSPC`` before any file is written if the tensors do not fit.
    """

    def __init__(self, announced: Iterable[Mapping[str, Tensor]], directory: Path, max_shard_bytes: int, *, is_new: bool = True) -> None:
        self._directory = directory
        shards = _shards(list(announced), max_shard_bytes)
        headers = [_header(shard) for shard in shards]
        names = _file_names(len(shards))
        self._size = sum(_size(part) for shard in shards for part in shard)
        self._names = names
        self._places: dict[str, _Place] = {}
        for i, (shard, header) in enumerate(zip(shards, headers, strict=True)):
            offset = len(header)
            for name, meta in ((n, t) for part in shard for n, t in part.items()):
                self._places[name] = _Place(i, offset, meta)
                offset += _bytes(meta)
        self._unwritten = set(self._places)
        if is_new:
            _refuse_small_disk(self._size, directory)
        self._files: list[int] = []
        with ExitStack() as stack:
            for name, header in zip(names, headers, strict=True):
                self._files.append(os.open(directory / name, os.O_WRONLY | (os.O_CREAT | os.O_TRUNC if is_new else 0), 0o644))
                stack.callback(os.close, self._files[-1])
                if is_new:
                    _write_at(self._files[-1], memoryview(header), 0)
            # While one part is written, the next is computed: at most two are in memory.
            self._thread = stack.enter_context(ThreadPoolExecutor(max_workers=1))
            self._closing = stack.pop_all()
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.close()

    def __contains__(self, name: object) -> bool:
        """Return whether a tensor of that full name was announced."""
        return name in self._places

    def write(self, part: Part) -> None:
        """Compute a part and start writing it to its places in the files; the writing may continue in the background."""
        tensors = [(self._places[name], _checked(name, tensor, self._places[name].meta)) for name, tensor in _in_order(part)]
        self._wait()
        self._unwritten.difference_update(part.meta)
        self._pending = self._thread.submit(self._write_all, tensors)

    def written(self) -> set[str]:
        """Return the names of the tensors that are in the files, after waiting for those that are being written."""
        self._wait()
        return set(self._places) - self._unwritten

    def count_as_written(self, names: Iterable[str]) -> None:
        """Note tensors that another process has written."""
        self._unwritten.difference_update(names)

    def finish(self) -> None:
        """Wait until all parts are written, and write the index.

        Raises:
            RuntimeError: An announced tensor has not been written.
        """
        self._wait()
        if self._unwritten:
            raise RuntimeError(f"{len(self._unwritten)} announced tensor(s) were not written: {folded(sorted(self._unwritten))}")
        if len(self._files) > 1:
            weight_map = {name: self._names[place.file] for name, place in sorted(self._places.items())}
            index = {"metadata": {"total_size": self._size}, "weight_map": weight_map}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
        self._pending = None

    def _write_all(self, tensors: Sequence[tuple[_Place, Tensor]]) -> None:
        for place, tensor in tensors:
            _write_at(self._files[place.file], memoryview(tensor.numpy().data), place.offset)


def _file_names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _refuse_small_disk(size: int, directory: Path) -> None:
    if size > shutil.disk_usage(directory).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


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


def _in_order(part: Part) -> Iterable[tuple[str, Tensor]]:
    """Return a part's tensors, in the order in which they were announced."""
    tensors = part.make()
    return [(name, tensors[name]) for name in part.meta]


def _checked(name: str, tensor: Tensor, expected: Tensor) -> Tensor:
    """Return the bytes of a tensor, after checking that shape and dtype are those announced."""
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        raise RuntimeError(
            f"'{name}' was announced as {expected.dtype}{list(expected.shape)} and made as {tensor.dtype}{list(tensor.shape)}"
        )
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; a single ``pwrite`` may write less than its argument."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(file, data[done:], offset + done)
