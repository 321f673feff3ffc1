"""Classes that read the tensors in the safetensors files of a checkpoint.

Names, shapes and dtypes come from the headers of the files. Values are read when they are needed.
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
"""A function that reads the tensor of a given name. Its first argument is the name. Its second argument is
the dtype of the result if the tensor is computed. A tensor that is only read keeps its stored dtype."""


class TensorFiles(Protocol):
    """The protocol of objects that read the tensors of a checkpoint.

    `FileTensors` reads tensors in their stored form. `quark.models.hf.dequantizer.DequantizedTensors`
    dequantizes them, and `quark.models.hf.converted_tensors.ConvertedTensors` applies weight converters.

    Attributes:
        meta: A dictionary from full name to a meta tensor with the shape and dtype, for every tensor.
    """

    meta: dict[str, Tensor]

    def reading(self, device: torch.device) -> AbstractContextManager[ReadTensor]:
        """Return a context manager that yields a function. The function reads a tensor and puts it on
        ``device``.

        Files are open only inside the ``with`` statement.
        """


class FileTensors:
    """The implementation of `TensorFiles` that reads the tensors of a checkpoint in their stored form.

    Args:
        shards: The files, from `quark.models.hf.shards.check_shards`.

    Attributes:
        meta: A dictionary from full name to a meta tensor with the stored shape and dtype.
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
        """Do as `TensorFiles.reading` says.

        Files are not mapped into memory, because the system would kill the process if a mapped file were
        truncated.

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
                    f"'{name}' cannot be read from '{shard.path}' ({error.strerror}). Fetch the checkpoint again"
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
        """Return the tensor ``name`` from the open file of a shard, on the CPU."""
        dtype, shape = shard.tensors[name]
        if dtype not in DTYPES:
            raise CheckpointError(f"'{name}' in '{shard.path}' has the dtype {dtype}, which quark cannot read. Fetch the checkpoint again")
        if 0 in shape:
            return torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
        if shard.path not in self._starts:
            self._starts[shard.path] = _starts(file)
        data = self._memory.take(math.prod(shape) * DTYPES[dtype].itemsize)
        if read_at(file, memoryview(data.numpy().data), self._starts[shard.path][name]) != len(data):
            shard.refuse_changed(file)
            raise CheckpointError(f"'{shard.path}' is truncated, because it ends within '{name}'. Fetch the checkpoint again")
        return data.view(DTYPES[dtype]).reshape(shape)


_MOST_FREE = 1 << 28
"""Maximum number of bytes of freed memory that are kept for later tensors."""


class _ReusedMemory:
    """A pool that reuses the memory of freed tensors for the tensors of the next block.

    The pool saves time, because the system needs nearly as long to provide new memory as to read a file into
    this memory. The times of one thread for 272 tensors (269 MB in total) from the file cache were: 63 ms
    into new memory, 46 ms into reused memory, and 66 ms if the file was mapped and each page was touched. The
    lower bound is 38 ms, the time to read the same bytes into one buffer. Larger or smaller reads and
    ``posix_fadvise`` did not change these times.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}

    def take(self, size: int) -> Tensor:
        """Return a uint8 tensor of ``size`` bytes. Its memory becomes free again when no tensor uses it."""
        try:
            memory = self._free[size].pop()
        except (KeyError, IndexError):  # IndexError, because another thread may take the last free memory
            memory = np.empty(size, dtype=np.uint8)
        lent = memory[:]  # this array lives as long as the storage of the tensor
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return torch.from_numpy(lent)

    def _give_back(self, memory: np.ndarray[Any, Any]) -> None:
        """Keep the memory of a freed tensor for later tensors, if the pool is not full."""
        if memory.nbytes + sum(size * len(free) for size, free in list(self._free.items())) <= _MOST_FREE:
            self._free.setdefault(memory.nbytes, []).append(memory)


def _starts(file: int) -> dict[str, int]:
    """Return a dictionary from tensor name to the position of the tensor's data in an open safetensors file.

    Check the header of the file before you call this function.
    """
    length = int.from_bytes(pread(file, 8, 0), "little")
    header = bytearray(length)
    read_at(file, memoryview(header), 8)
    entries = json.loads(header)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}
