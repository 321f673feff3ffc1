"""Numbers from a device: reading one on the host waits until everything before it is computed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["numbers"]


def numbers(*tensors: Tensor) -> list[float]:
    """Return the values of scalar tensors of one device; the host waits for the device once.

    At least one tensor is given.

    Args:
        tensors: Of any real dtype, without dimensions; truth values become 0 and 1.

    Example:
        >>> numbers(torch.tensor(2), torch.tensor(0.5), torch.tensor(True))
        [2.0, 0.5, 1.0]
    """
    return torch.stack([tensor.detach().to(torch.float64) for tensor in tensors]).tolist()
