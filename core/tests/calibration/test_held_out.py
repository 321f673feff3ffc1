"""The choice of held-out tokens.

It does not depend on the order of sequences or on batches, and it is never empty.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quark.calibration.held_out import FEWEST_SEQUENCES, LEAST_SHARE, MOST_SHARE, ONE_IN, held_out, held_out_ends

ROWS = torch.arange(16 * 32).reshape(16, 32)


def held(rows: Tensor, masks: list[Tensor]) -> set[int]:
    return set(rows[torch.cat(masks)].tolist())


def test_of_one_batch_and_of_batches_of_any_size_the_same_tokens_are_held_out() -> None:
    expected = held(ROWS, held_out([ROWS]))
    assert LEAST_SHARE * ROWS.numel() <= len(expected) <= MOST_SHARE * ROWS.numel()
    for size in (1, 3, 8):
        assert held(ROWS, held_out(list(ROWS.split(size)))) == expected


@given(st.permutations(range(16)), st.integers(1, 16), st.integers(1, 16))
def test_the_order_of_sequences_makes_no_difference(order: list[int], number: int, batch: int) -> None:
    rows = ROWS[:number]
    shuffled = rows[[i for i in order if i < number]]
    expected = held(rows, held_out([rows]))
    assert held(shuffled, held_out(list(shuffled.split(batch)))) == expected
    assert expected


def test_of_few_sequences_the_end_of_each_is_held_out() -> None:
    mask = held_out([ROWS[:3]])[0]
    assert torch.equal(mask, (torch.arange(32) >= 28).expand(3, 32))


def test_of_many_sequences_some_whole_ones_are_held_out() -> None:
    mask = held_out([ROWS])[0]
    assert torch.equal(mask.any(-1), mask.all(-1))
    assert int(mask.any(-1).sum()) >= FEWEST_SEQUENCES


def test_copies_of_a_sequence_are_held_out_together_or_not_at_all() -> None:
    rows = torch.cat((ROWS, ROWS))
    first, second = held_out([rows])[0].split(16)
    assert torch.equal(first, second)
    assert first.any()


def test_copies_count_as_one_sequence() -> None:
    """Enough different sequences are held out, whichever sequence has copies."""
    different_rows = torch.arange(32 * 32).reshape(32, 32)
    for copied in range(32):
        rows = torch.cat([different_rows, different_rows[copied].expand(4, -1)])
        different = held_out([rows])[0].all(-1)
        assert len(set(rows[different][:, 0].tolist())) >= FEWEST_SEQUENCES


def test_of_copies_of_one_sequence_the_end_is_held_out() -> None:
    mask = held_out([ROWS[:1].expand(16, -1)])[0]
    assert torch.equal(mask, (torch.arange(32) >= 28).expand(16, 32))


def test_images_are_held_out_as_a_whole() -> None:
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    masks = held_out([images[:5], images[5:]])
    assert [m.shape for m in masks] == [(5, 1), (3, 1)]
    assert int(torch.cat(masks).sum()) == FEWEST_SEQUENCES


def test_where_nothing_can_be_held_out_nothing_is() -> None:
    for rows in (ROWS[:1, :1], ROWS[:1, :3], torch.zeros(1, 3, 4, 4), torch.zeros(3, 3, 4, 4)):
        assert not held_out([rows])[0].any()


def test_one_image_of_four_is_better_than_none() -> None:
    images = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert int(held_out([images])[0].sum()) == 1


@given(st.lists(st.integers(1, 70), min_size=1, max_size=5))
def test_of_each_sequence_the_last_sixteenth_is_held_out_for_tunings(lengths: list[int]) -> None:
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    flags = held_out_ends(rows).split(lengths)
    assert [int(own.sum()) for own in flags] == [length // ONE_IN for length in lengths]
    assert all(bool(own.sort().values.equal(own)) for own in flags)  # the last ones
