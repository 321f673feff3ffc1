"""Contexts that set torch's default state for a run or an import, even if the caller has set another one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_TURN = threading.RLock()
"""A lock for threads that take turns. This is necessary because torch has one precision of matrix products
for the whole process."""
_DEFAULT_DTYPE = threading.RLock()
"""A lock for threads that change the default dtype of the process."""


@contextmanager
def own_torch_state(*, takes_turns: bool = True) -> Iterator[None]:
    """Run the ``with`` block under torch's default state, and restore the caller's state afterwards.

    Autocast and inference mode are off. New tensors are float32 and on the CPU by default. Threads take
    turns: the block of one thread ends before the block of the next thread begins.

    Args:
        takes_turns: Whether threads take turns. It must be False if the block waits for other ranks, because
            these ranks could be threads of this process.
    """
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        if takes_turns:
            stack.enter_context(_TURN)
        stack.enter_context(_float32_by_default())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        for device_type in ["cpu"] if accelerator is None else ["cpu", accelerator.type]:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type != "cpu":  # a device mode costs time at every call of torch
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def plain_torch_state() -> Iterator[None]:
    """Run the ``with`` block under torch's default state.

    This context is like `own_torch_state`, but it also enables gradients, and threads do not take turns.
    """
    with own_torch_state(takes_turns=False), torch.enable_grad():
        yield


@contextmanager
def building() -> Iterator[None]:
    """Let only one thread at a time run the ``with`` block, which must build a model. Threads must not build
    models at the same time, because transformers changes the default dtype of the process while it builds a
    model."""
    with _DEFAULT_DTYPE:
        yield


@contextmanager
def _float32_by_default() -> Iterator[None]:
    with _DEFAULT_DTYPE:
        callers = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        with _DEFAULT_DTYPE:
            torch.set_default_dtype(callers)
