"""A run's state of torch: threads take turns, and the earlier state returns, after errors too."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch

from quark.base.torch_state import building, own_torch_state


def test_threads_take_turns() -> None:
    entered = threading.Event()

    def run() -> None:
        with own_torch_state():
            entered.set()

    with own_torch_state(), own_torch_state():
        thread = threading.Thread(target=run)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(5)
    thread.join()


def test_a_model_can_be_built_while_a_run_of_another_thread_lasts() -> None:
    built = threading.Event()

    def build() -> None:
        with building():
            built.set()

    with own_torch_state():
        thread = threading.Thread(target=build)
        thread.start()
        assert built.wait(5)
        thread.join()


def test_what_was_set_is_put_back_after_an_error() -> None:
    torch.set_default_dtype(torch.float16)
    try:
        with suppress(KeyError), torch.inference_mode(), torch.autocast("cpu", torch.float16), own_torch_state():
            assert torch.get_default_dtype() is torch.float32
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")
            raise KeyError
        assert torch.get_default_dtype() is torch.float16
    finally:
        torch.set_default_dtype(torch.float32)
