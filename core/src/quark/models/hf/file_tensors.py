"""The tensors of a checkpoint's safetensors files, as they are stored.

Names, shapes and dtypes from headers, values when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quark.base.shortages import shortage
from quark.errors import CheckpointError
from quark.models.hf.shards import DTYPES, Shard

__all__ = ["FileTensors", "ReadTensor", "TensorFiles"]

ReadTensor = Callable[[str, torch.dtype], Tensor]
"""Reads the tensor of a name. The dtype is that of values that have to be computed; a tensor that is stored
keeps its own.
"""


class TensorFiles(Protocol):
    """Tensors of a checkpoint by name: as they are stored, dequantized, or converted.

    Attributes:
        meta: Every tensor by full name, on the meta device, in the dtype that it is stored in.
    """

    meta: dict[str, Tensor]

    def reading(self, device: torch.device) -> AbstractContextManager[ReadTensor]:
        """Return the context of a function that reads tensors to a device.

        Files are open only while the body runs.
        """


class FileTensors:
    """Tensors as they are stored.

    Args:
        shards: From `quark.models.hf.shards.check_shards`.

    Attributes:
        meta: As of `TensorFiles`.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._file_of = {name: shard.path for shard in shards for name in shard.tensors}
        self.meta: dict[str, Tensor] = {
            name: torch.empty(shape, dtype=DTYPES.get(dtype, torch.float32), device="meta")
            for shard in shards
            for name, (dtype, shape) in shard.tensors.items()
        }

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[ReadTensor]:
        """As `TensorFiles.reading`.

        Raises:
            CheckpointError: A file has changed or cannot be read.
        """
        with ExitStack() as stack:
            files: dict[Path, Any] = {}

            def read(name: str, _: torch.dtype) -> Tensor:
                path = self._file_of[name]
                try:
                    if path not in files:
                        files[path] = stack.enter_context(safe_open(path, framework="pt"))
                    tensor: Tensor = files[path].get_tensor(name)
                except (SafetensorError, OSError) as error:
                    if shortage(error) is not None:
                        raise
                    raise CheckpointError(f"'{name}' cannot be read from '{path}' ({error}): fetch the checkpoint again") from error
                return tensor.to(device)

            yield read
