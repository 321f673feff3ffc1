"""Inputs that forward passes hold in front of a block, kept in files if memory is short.

A calibration set may exceed memory. A waiting forward pass holds the arguments of the block, mainly its
hidden states, in local variables of the model's own code. The tensor objects stay the same, but their storage
becomes a private mapping of a file, whose pages the system reads when the forward continues.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from quark.base.files import release_pages, write_at
from quark.errors import CalibrationError

LEAST_SPILLED = 1 << 16
"""Minimum size in bytes of a tensor that is written to a file."""


class SpilledInputs:
    """Block inputs of waiting forward passes: in memory up to a number of bytes, the others in files.

    The system removes each file when its tensor is freed, and all when the process is killed.

    Args:
        directory: Directory of the files. A directory in memory (tmpfs) would be useless.
        allowed: Bytes that may stay in memory.
    """

    def __init__(self, directory: Path, allowed: int) -> None:
        self._directory = directory
        self._allowed = allowed
        self._kept: WeakKeyDictionary[Hashable, int] = WeakKeyDictionary()
        # A mapping lives as long as its tensor.
        self._mapped: WeakKeyDictionary[Hashable, WeakSet[mmap.mmap]] = WeakKeyDictionary()

    def hold(self, forward: Hashable, arguments: Any) -> None:
        """Move the tensors among ``arguments`` to files, unless memory has room for them.

        Tensors on other devices than the CPU, views of larger tensors, and tensors below `LEAST_SPILLED`
        bytes stay where they are.

        Args:
            forward: The waiting forward pass; it waits nowhere else.
            arguments: Tensors, in tuples, lists and dictionaries. Their storage changes, but no value.
        """
        self._kept.pop(forward, None)
        tensors = {id(t): t for t in tree_leaves(arguments) if _is_movable(t)}.values()
        size = sum(t.nbytes for t in tensors)
        if sum(self._kept.values()) + size <= self._allowed:
            self._kept[forward] = size
            return
        mapped = self._mapped.setdefault(forward, WeakSet())
        for tensor in tensors:
            mapped.add(self._spill(tensor))
        self.leave(forward)

    def leave(self, forward: Hashable) -> None:
        """Drop from memory the pages that a forward pass has read from its files, because it waits again.

        The files keep them.
        """
        for memory in self._mapped.get(forward, ()):
            release_pages(memory)

    def _spill(self, tensor: Tensor) -> mmap.mmap:
        data = memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)
        try:
            with tempfile.TemporaryFile(dir=self._directory, prefix="quark-inputs-") as file:
                file.truncate(len(data))
                write_at(file.fileno(), data, 0)
                memory = mmap.mmap(file.fileno(), len(data))
        except OSError as error:
            raise CalibrationError(
                f"the inputs of blocks cannot be written to '{self._directory}' ({error.strerror}): free some space there, or keep more of "
                "them in memory with activation_memory (--activation-memory)"
            ) from error
        del data
        tensor.set_(torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape))  # type: ignore[call-overload]
        return memory


def _is_movable(tensor: Any) -> bool:
    """Return whether a tensor is all of its storage, in the process's memory, allocated by torch."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes < LEAST_SPILLED:
        return False
    storage = tensor.untyped_storage()
    return tensor.layout is torch.strided and storage.nbytes() == tensor.nbytes and storage.resizable()
