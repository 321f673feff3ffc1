"""The tensors of a checkpoint's safetensors files, as stored.

Names, shapes and dtypes come from headers; values are read when needed.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quark.base.files import open_file, pread, read_at
from quark.base.shortages import shortage
from quark.errors import CheckpointError
from quark.models.hf.shards import DTYPES, Shard

ReadTensor = Callable[[str, torch.dtype], Tensor]
"""Reads the tensor of a name. The dtype applies only to computed values; a stored tensor keeps its own.
"""


class TensorFiles(Protocol):
    """Tensors of a checkpoint by name: as stored, dequantized, or converted.

    Attributes:
        meta: Every tensor by full name, on the meta device, in its stored dtype.
    """

    meta: dict[str, Tensor]

    def reading(self, device: torch.device) -> AbstractContextManager[ReadTensor]:
        """Return a context that yields a function for reading tensors to a device.

        Files are open only while the body runs.
        """


class FileTensors:
    """Tensors as stored.

    Args:
        shards: From `quark.models.hf.shards.check_shards`.

    Attributes:
        meta: As in `TensorFiles`.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shard_of = {name: shard for shard in shards for name in shard.tensors}
        self._memory = _ReusedMemory()
        self._starts: dict[Path, dict[str, int]] = {}
        self.meta: dict[str, Tensor] = {
            name: torch.empty(shape, dtype=DTYPES.get(dtype, torch.float32), device="meta")
            for shard in shards
            for name, (dtype, shape) in shard.tensors.items()
        }

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[ReadTensor]:
        """As `TensorFiles.reading`.

        Files are read, not mapped: truncating a mapped file would kill the process.

        Raises:
            CheckpointError: A file has changed since its header was checked, or cannot be read.
        """
        files: dict[Path, tuple[Shard, int]] = {}

        def read(name: str, _: torch.dtype) -> Tensor:
            shard = self._shard_of[name]
            try:
                if shard.path not in files:
                    files[shard.path] = shard, open_file(shard.path, os.O_RDONLY)
                    shard.refuse_changed(files[shard.path][1])
                tensor = self._read(shard, files[shard.path][1], name)
            except OSError as error:
                if shortage(error) is not None:
                    raise
                raise CheckpointError(
                    f"'{name}' cannot be read from '{shard.path}' ({error.strerror}): fetch the checkpoint again"
                ) from error
            return tensor.to(device)

        try:
            yield read
            for shard, file in files.values():
                shard.refuse_changed(file)
        finally:
            for _, file in files.values():
                os.close(file)

    def _read(self, shard: Shard, file: int, name: str) -> Tensor:
        dtype, shape = shard.tensors[name]
        if dtype not in DTYPES:
            raise CheckpointError(f"'{name}' in '{shard.path}' has the dtype {dtype}, which quark cannot read: fetch the checkpoint again")
        if 0 in shape:
            return torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
        if shard.path not in self._starts:
            self._starts[shard.path] = _starts(file)
        data = self._memory.take(math.prod(shape) * DTYPES[dtype].itemsize)
        if read_at(file, memoryview(data.numpy().data), self._starts[shard.path][name]) != len(data):
            shard.refuse_changed(file)
            raise CheckpointError(f"'{shard.path}' ends within '{name}': it is truncated, fetch the checkpoint again")
        return data.view(DTYPES[dtype]).reshape(shape)


_MOST_FREE = 1 << 28
"""Maximum number of bytes that are kept for later tensors."""


class _ReusedMemory:
    """Reuses the memory of freed tensors for the tensors of the next block.

    Getting new memory from the system takes as long as reading a file into it. On one thread, reading 272
    cached tensors (269 MB in total) took 63 ms into new memory and 46 ms into reused memory. The lower bound,
    a read of the same bytes into one buffer, took 38 ms. Mapping the file and touching each page took 66 ms.
    Larger or smaller reads and ``posix_fadvise`` changed nothing.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}

    def take(self, size: int) -> Tensor:
        """Return ``size`` bytes, uint8, which become free again when no tensor uses them."""
        try:
            memory = self._free[size].pop()
        except (KeyError, IndexError):  # another thread may take the last one
            memory = np.empty(size, dtype=np.uint8)
        lent = memory[:]  # lives as long as the tensor's storage
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return torch.from_numpy(lent)

    def _give_back(self, memory: np.ndarray[Any, Any]) -> None:
        if memory.nbytes + sum(size * len(free) for size, free in list(self._free.items())) <= _MOST_FREE:
            self._free.setdefault(memory.nbytes, []).append(memory)


def _starts(file: int) -> dict[str, int]:
    """Return the start of each tensor in an open safetensors file, whose header has been checked."""
    length = int.from_bytes(pread(file, 8, 0), "little")
    header = bytearray(length)
    read_at(file, memoryview(header), 8)
    entries = json.loads(header)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}
