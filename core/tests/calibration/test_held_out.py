"""Which tokens are held out.

The same ones in any order and in any batches, some in every case, and never padding.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quark.calibration.held_out import FEWEST_SEQUENCES, LEAST_SHARE, MOST_SHARE, ONE_IN, Sequences, held_out, held_out_ends

ROWS = torch.arange(16 * 32).reshape(16, 32)


def held(rows: Tensor, masks: list[Tensor]) -> set[int]:
    return set(rows[torch.cat(masks)].tolist())


def test_of_one_batch_and_of_batches_of_any_size_the_same_tokens_are_held_out() -> None:
    expected = held(ROWS, held_out([Sequences(ROWS)]))
    assert LEAST_SHARE * ROWS.numel() <= len(expected) <= MOST_SHARE * ROWS.numel()
    for size in (1, 3, 8):
        assert held(ROWS, held_out([Sequences(part) for part in ROWS.split(size)])) == expected


@given(st.permutations(range(16)), st.integers(1, 16), st.integers(1, 16))
def test_the_order_of_sequences_makes_no_difference(order: list[int], number: int, batch: int) -> None:
    rows = ROWS[:number]
    shuffled = rows[[i for i in order if i < number]]
    expected = held(rows, held_out([Sequences(rows)]))
    assert held(shuffled, held_out([Sequences(part) for part in shuffled.split(batch)])) == expected
    assert expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12), st.booleans())
def test_padding_is_never_held_out_and_never_counted(sizes: list[tuple[int, int]], is_left: bool) -> None:
    """Rows of some tokens and some padding, wherever it lies.

    The same tokens are held out as without it, a quarter at most.
    """
    width = max(sum(size) for size in sizes) or 1
    calls, plain, total = [], [], 0
    for i, (tokens, _) in enumerate(sizes):
        ids = torch.arange(100 * i + 1, 100 * i + 1 + tokens)
        padding = torch.zeros(width - tokens, dtype=torch.long)
        row = torch.cat((padding, ids) if is_left else (ids, padding))
        calls.append(Sequences(row[None], (row != 0)[None].long()))
        plain.append(Sequences(ids[None]))
        total += tokens
    found = [held(c.rows, [m]) for c, m in zip(calls, held_out(calls), strict=True)]
    assert found == [held(c.rows, [m]) for c, m in zip(plain, held_out(plain), strict=True)]
    number = sum(len(f) for f in found)
    assert all(0 not in f for f in found)
    assert number <= MOST_SHARE * total
    assert number > 0 or all(tokens < 4 for tokens, _ in sizes)


def test_of_few_sequences_the_end_of_each_is_held_out() -> None:
    mask = held_out([Sequences(ROWS[:3])])[0]
    assert torch.equal(mask, (torch.arange(32) >= 28).expand(3, 32))


def test_of_many_sequences_some_whole_ones_are_held_out() -> None:
    mask = held_out([Sequences(ROWS)])[0]
    assert torch.equal(mask.any(-1), mask.all(-1))
    assert int(mask.any(-1).sum()) >= FEWEST_SEQUENCES


def test_copies_of_a_sequence_are_held_out_together_or_not_at_all() -> None:
    rows = torch.cat((ROWS, ROWS))
    first, second = held_out([Sequences(rows)])[0].split(16)
    assert torch.equal(first, second)
    assert first.any()


def test_of_copies_of_one_sequence_the_end_is_held_out() -> None:
    mask = held_out([Sequences(ROWS[:1].expand(16, -1))])[0]
    assert torch.equal(mask, (torch.arange(32) >= 28).expand(16, 32))


def test_images_are_held_out_as_a_whole() -> None:
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    masks = held_out([Sequences(images[:5]), Sequences(images[5:])])
    assert [m.shape for m in masks] == [(5, 1), (3, 1)]
    assert int(torch.cat(masks).sum()) == FEWEST_SEQUENCES


def test_where_nothing_can_be_held_out_nothing_is() -> None:
    for rows in (ROWS[:1, :1], ROWS[:1, :3], torch.zeros(1, 3, 4, 4), torch.zeros(3, 3, 4, 4)):
        assert not held_out([Sequences(rows)])[0].any()


def test_one_image_of_four_is_better_than_none() -> None:
    images = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert int(held_out([Sequences(images)])[0].sum()) == 1


@given(st.lists(st.integers(1, 70), min_size=1, max_size=5))
def test_of_each_sequence_the_last_sixteenth_is_held_out_for_tunings(lengths: list[int]) -> None:
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    flags = held_out_ends(rows).split(lengths)
    assert [int(own.sum()) for own in flags] == [length // ONE_IN for length in lengths]
    assert all(bool(own.sort().values.equal(own)) for own in flags)  # the last ones
