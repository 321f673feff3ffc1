"""Which tokens of a tensor are looked at.

Without padding, held out or not, in whatever arrangement a layer gets them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quark.calibration.batches import Call
from quark.calibration.pause_points import tokens_of

X = torch.arange(24.0).reshape(2, 4, 3)
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
HELD = torch.tensor([[0, 0, 0, 1], [0, 1, 0, 0]]).bool()


def numbers(x: Tensor) -> list[int]:
    """Of the tokens, by their place."""
    return (x[:, 0] / 3).int().tolist()


@pytest.mark.parametrize("x", [X, X.flatten(0, 1)])
@pytest.mark.parametrize(("held_out", "expected"), [(None, [1, 2, 3, 4, 5]), (True, [3, 5]), (False, [1, 2, 4])])
def test_tokens_are_divided_and_padding_is_in_neither_part(x: Tensor, held_out: bool | None, expected: list[int]) -> None:
    call = Call(kwargs={"attention_mask": MASK}, held_out=HELD)
    assert numbers(tokens_of(x, call, held_out=held_out)) == expected


def test_without_a_mask_all_are_tokens() -> None:
    assert numbers(tokens_of(X, Call(held_out=HELD), held_out=False)) == [0, 1, 2, 4, 6, 7]


def test_of_a_call_without_any_nothing_is_held_out() -> None:
    call = Call(kwargs={"attention_mask": MASK})
    assert numbers(tokens_of(X, call, held_out=False)) == [1, 2, 3, 4, 5]
    assert len(tokens_of(X, call, held_out=True)) == 0


def test_a_row_that_is_held_out_is_so_with_all_its_places() -> None:
    call = Call(held_out=torch.tensor([[False], [True]]))
    assert numbers(tokens_of(X[:, :, None], call, held_out=True)) == [4, 5, 6, 7]


def test_tokens_routed_to_an_expert_are_held_out_with_the_whole_of_their_call_alone() -> None:
    routed = X.flatten(0, 1)[[5, 1, 3]]
    part, whole = Call(kwargs={"attention_mask": MASK}, held_out=HELD), Call(kwargs={"attention_mask": MASK}, held_out=MASK.bool())
    assert numbers(tokens_of(routed, part, held_out=False)) == [5, 1, 3]
    assert len(tokens_of(routed, part, held_out=True)) == 0
    assert len(tokens_of(routed, whole, held_out=False)) == 0
    assert numbers(tokens_of(routed, whole, held_out=True)) == [5, 1, 3]
