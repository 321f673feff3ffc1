"""SpilledInputs: moves inputs of a block from memory to files while forward passes wait at the block.

The inputs of all calibration samples may need more memory than is available. Local variables of the model's
own code refer to the arguments of the block, mainly the hidden states, while a forward pass waits. So the
tensor objects must stay the same. Only their storage is replaced: a file that is mapped privately takes its
place. The system reads the pages of the file when the forward pass continues.
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
"""Minimum size, in bytes, of a tensor that is moved to a file."""


class SpilledInputs:
    """Moves the block inputs of waiting forward passes to files if they need more than ``allowed`` bytes.

    The system removes a file when its tensor is freed, and all files when the process ends.

    Args:
        directory: Directory of the files. It must be on a disk: a directory in memory (tmpfs) would be
            useless.
        allowed: Number of bytes of inputs that may stay in memory.
    """

    def __init__(self, directory: Path, allowed: int) -> None:
        self._directory = directory
        self._allowed = allowed
        self._kept: WeakKeyDictionary[Hashable, int] = WeakKeyDictionary()
        # A mapping lives as long as its tensor.
        self._mapped: WeakKeyDictionary[Hashable, WeakSet[mmap.mmap]] = WeakKeyDictionary()

    def hold(self, forward: Hashable, arguments: Any) -> None:
        """Move the tensors in ``arguments`` to files if the inputs need more than the allowed number of
        bytes.

        A tensor stays where it is if it is not on the CPU, if it is a view of a larger tensor, or if it has
        fewer than `LEAST_SPILLED` bytes.

        Args:
            forward: The waiting forward pass. The bytes that it needed at its previous block are no longer
                counted.
            arguments: Tuples, lists and dictionaries of tensors. The storage of the tensors is replaced, but
                their values stay the same.
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
        """Release the memory of the pages that a forward pass has read from its files. The files are not
        removed.

        Call this when the forward pass waits again.
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
                f"the inputs of blocks cannot be written to '{self._directory}' ({error.strerror}). Free some space there, or keep more "
                "inputs in memory with activation_memory (--activation-memory)"
            ) from error
        del data
        tensor.set_(torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape))  # type: ignore[call-overload]
        return memory


def _is_movable(tensor: Any) -> bool:
    """Return whether a tensor can be moved to a file.

    It must be a large, contiguous CPU tensor that fills its storage, and torch must have allocated this
    storage.
    """
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes < LEAST_SPILLED:
        return False
    storage = tensor.untyped_storage()
    return tensor.layout is torch.strided and storage.nbytes() == tensor.nbytes and storage.resizable()
