"""Values of FP4 codes (E2M1), two in a byte, the first in the low half.

Source: OCP Microscaling Formats, version 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["e2m1_values"]

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def e2m1_values(packed: Tensor) -> Tensor:
    """Return the values of codes, float32, twice as many along the last axis as there are bytes.

    >>> e2m1_values(torch.tensor([[0x21, 0xF8]], dtype=torch.uint8)).tolist()
    [[0.5, 1.0, -0.0, -6.0]]
    """
    grid = torch.tensor(_VALUES, device=packed.device)
    return grid[torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).int()]
