"""Scratch memory: what one use holds, no other use, thread or mode disturbs."""

from concurrent.futures import ThreadPoolExecutor

import torch

from quark.numbers.scratch import scratch

CPU = torch.device("cpu")


def test_memory_is_used_again_for_the_same_use_and_no_other() -> None:
    one = scratch((4, 8), torch.float32, CPU, "one").fill_(1)
    other = scratch((4, 8), torch.float32, CPU, "other").fill_(2)
    assert bool((one == 1).all())
    again = scratch((2, 8), torch.int16, CPU, "one")
    assert again.data_ptr() == one.data_ptr() != other.data_ptr()
    assert (again.shape, again.dtype) == ((2, 8), torch.int16)


def test_threads_have_memory_of_their_own() -> None:
    here = scratch((64,), torch.float32, CPU, "one")
    with ThreadPoolExecutor(1) as executor:
        there = executor.submit(scratch, (64,), torch.float32, CPU, "one").result()
        assert there.data_ptr() != here.data_ptr()


def test_memory_from_inference_mode_is_written_to_outside_of_it() -> None:
    with torch.inference_mode():
        scratch((64,), torch.float32, CPU, "of inference")
    assert bool((scratch((64,), torch.float32, CPU, "of inference").zero_() == 0).all())


def test_memory_for_more_than_a_tile_is_not_kept() -> None:
    held = scratch((1 << 20,), torch.float32, CPU, "large")
    assert scratch((1 << 20,), torch.float32, CPU, "large").data_ptr() != held.data_ptr()
