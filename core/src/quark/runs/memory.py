"""Memory: how much calibration needs to hold activations, how much is free, and how freed blocks are given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark.calibration.batches import Call
from quark.planning.decoder_blocks import Block
from quark.planning.plan import PlanRow

__all__ = ["LEAST_RETURNED", "SHARE", "FreedMemory", "free_bytes", "held_bytes", "held_probabilities", "return_freed", "tokens_in"]

SHARE = 0.5
"""The share of the free memory that activations may take, unless the configuration says otherwise."""

LEAST_RETURNED = 64 << 20
"""Bytes that blocks have freed before they are given back to the system; a larger block is given back by itself."""


def tokens_in(calls: Iterable[Call]) -> int:
    """Return the number of tokens of all calls: elements of their token ids, or vectors of their first floating-point argument."""
    tokens = 0
    for call in calls:
        first = next((v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)), None)
        if first is not None:
            tokens += first.numel() // (first.shape[-1] if first.is_floating_point() and first.ndim > 1 else 1)
    return tokens


def held_bytes(blocks: Sequence[Block], inside: Sequence[Sequence[PlanRow]], model: nn.Module, tokens: int, streams: int) -> int:
    """Estimate the bytes that forwards hold while they wait inside a block: residual stream, its normed form, inputs, other outputs.

    Args:
        blocks: All of them.
        inside: The layers of each.
        model: For its dtype.
        tokens: Of all calls together.
        streams: Forwards of each call.
    """
    widest = 0
    for _, rows in zip(blocks, inside, strict=True):
        shapes = [r.shape for r in rows if len(r.shape) == 2]
        if shapes:
            widest = max(widest, 2 * min(max(s) for s in shapes) + max(s[0] + s[1] for s in shapes))
    size = next((p.element_size() for p in model.parameters()), 4)
    return tokens * widest * size * streams


def held_probabilities(model: nn.Module, calls: Iterable[Call]) -> int:
    """Estimate the bytes of attention probabilities that forwards hold while they wait inside attention: logits and softmax in float32.

    Args:
        model: For the number of its heads; without a configuration that says it there is one.
        calls: Of calibration.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    found = 0
    for call in calls:
        ids = next((v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor) and v.ndim > 1), None)
        if ids is not None:
            found += 2 * 4 * heads * ids.shape[0] * ids.shape[1] ** 2
    return found


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device; None where it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def return_freed() -> None:
    """Give memory that is free in this process back to the system, where its C library can be told to.

    That of Linux keeps what lies between allocations in use: without this, float weights that rounded ones have replaced would stay
    resident, a block's worth for each block. See `FreedMemory` for when.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


class FreedMemory:
    """Counts what blocks free, and returns it when there is enough: each return takes a while, and so does the memory's coming back.

    Args:
        enough: Bytes. Runs that do much with a block can afford to return all of it at once.
    """

    def __init__(self, enough: int = LEAST_RETURNED) -> None:
        self._enough = enough
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count ``size`` bytes that a block has freed, and give them back if there are enough."""
        self._bytes += size
        if self._bytes >= self._enough:
            return_freed()
            self._bytes = 0


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another system, or another library
        return None
    return found
