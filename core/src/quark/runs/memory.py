"""Functions for memory. They estimate the memory that activations need, determine the free memory of a
device, and return freed memory to the system.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from quark.base.machine import available_bytes, return_freed
from quark.calibration.batches import Call
from quark.calibration.padding import main_tensor
from quark.models.plan.decoder_blocks import decoder_blocks, rows_by_block
from quark.models.plan.family import text_config
from quark.models.plan.quant_plan import QuantPlan

SHARE = 0.5
"""The share of the free memory that activations may use by default."""

LEAST_RETURNED = 64 << 20
"""When this many bytes have been freed, memory is returned to the system."""


def tokens_in(calls: Iterable[Call]) -> int:
    """Return the number of tokens in all calls.

    Each token id is a token. If an input is floating-point, each vector along its last axis is a token.
    """
    tokens = 0
    for call in calls:
        main = main_tensor(call.args, call.kwargs)
        if main is not None:
            tokens += main.numel() // (main.shape[-1] if main.is_floating_point() and main.ndim > 1 else 1)
    return tokens


def held_bytes(model: nn.Module, plan: QuantPlan, tokens: int, streams: int) -> int:
    """Return an estimate of the bytes that forward passes need while they pause inside a block.

    The estimate includes the residual stream, the normed residual stream, and inputs and outputs of layers.

    Args:
        model: The model. The estimate uses its dtype.
        plan: The plan of the model.
        tokens: The number of tokens of all calls together.
        streams: The number of forward passes of each call.
    """
    widest = 0
    for rows in rows_by_block(decoder_blocks(model, plan.architecture), plan.quantized):
        shapes = [r.shape for r in rows if len(r.shape) == 2]
        if shapes:
            widest = max(widest, 2 * min(max(s) for s in shapes) + max(s[0] + s[1] for s in shapes))
    size = next((p.element_size() for p in model.parameters()), 4)
    return tokens * widest * size * streams


def held_probabilities(model: nn.Module, calls: Iterable[Call]) -> int:
    """Return an estimate of the bytes that paused forward passes need for attention logits and probabilities.

    The logits and the probabilities are assumed to be float32.

    Args:
        model: The model. If its configuration does not state the number of heads, one head is assumed.
        calls: The calibration calls.
    """
    heads = int(getattr(text_config(model), "num_attention_heads", None) or 1)
    bytes_held = 0
    for call in calls:
        main = main_tensor(call.args, call.kwargs)
        if main is not None and main.ndim > 1:
            bytes_held += 2 * 4 * heads * main.shape[0] * main.shape[1] ** 2
    return bytes_held


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes, or None if it is unknown.

    Memory that torch has reserved but does not use is counted as free.
    """
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        if not hasattr(module, "mem_get_info"):
            return None
        kept = module.memory_reserved(device) - module.memory_allocated(device) if hasattr(module, "memory_reserved") else 0
        return int(module.mem_get_info(device)[0]) + int(kept)
    return available_bytes()


class FreedMemory:
    """Counts freed bytes, and returns memory to the system after each `LEAST_RETURNED` bytes.

    Returning memory takes time, so it is not returned after every small number of freed bytes.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, size: int) -> None:
        """Record that ``size`` bytes were freed. If the threshold is reached, return memory to the system."""
        self._bytes += size
        if self._bytes >= LEAST_RETURNED:
            return_freed()
            self._bytes = 0


@contextmanager
def collecting_later() -> Iterator[None]:
    """Disable Python's garbage collection in the body of the ``with`` statement.

    Use it while many modules are created: the garbage collector would scan all objects again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
