"""Scratch memory: room for the temporaries of one tile, which a thread uses again for the next tile and the next tensor.

Fresh memory costs several times what arithmetic in a cache does: the system hands it out page by page, and
clears each page.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["scratch"]

_LOCAL = threading.local()
_KEPT = 1 << 20
"""Bytes of the largest room that a thread keeps."""


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device, use: str) -> Tensor:
    """Return uninitialized memory, contiguous, which holds until the thread asks for ``use`` again.

    Args:
        shape: Of the result.
        dtype: Of the result.
        device: On devices other than the CPU, and for more than a tile, the memory is fresh.
        use: What it is for: two pieces of scratch memory that are needed at once have different uses.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size > _KEPT:
        return torch.empty(shape, dtype=dtype, device=device)
    rooms: dict[str, Tensor] = _LOCAL.__dict__
    room = rooms.get(use)
    if room is None or room.numel() < size:
        with torch.inference_mode(False):  # memory of inference mode could not be written to outside of it
            rooms[use] = room = torch.empty(size, dtype=torch.uint8)
    return room[:size].view(dtype).view(shape)
