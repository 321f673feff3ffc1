"""The state of torch that a run and an import bring along, whatever their caller has set."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_TURN = threading.RLock()
"""Held by the thread whose run it is: torch's precision of products belongs to the whole process."""
_DEFAULT_DTYPE = threading.RLock()
"""Held while the default dtype of the process is changed."""


@contextmanager
def own_torch_state(*, takes_turns: bool = True) -> Iterator[None]:
    """Let the body compute as in a fresh process, and put back what was there before.

    Autocast and inference mode are off, and tensors are made in float32 and on the CPU unless they say
    otherwise. Threads take turns: the body of one ends before that of the next begins.

    Args:
        takes_turns: False if the body waits for other ranks, which could be threads of this process.
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
    """Let the body make tensors as a fresh process does: as in `own_torch_state`, with gradients."""
    with own_torch_state(takes_turns=False), torch.enable_grad():
        yield


@contextmanager
def building() -> Iterator[None]:
    """Let one thread at a time build a model: transformers sets the process's default dtype meanwhile."""
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
