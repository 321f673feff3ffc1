"""What tells a run from another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.calibration.batches import Call
from quark.runs.identity import _identity_of_data, differences

LEAVES = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(value=st.dictionaries(st.text(), VALUES))
def test_nothing_differs_from_itself(value: dict[str, Any]) -> None:
    assert differences(value, value) == []


def test_each_value_that_differs_is_named_with_both_values() -> None:
    before = {"a": {"b": [1, 2], "gone": None}, "same": 1}
    now = {"a": {"b": [1, 3, 4]}, "same": 1}
    assert differences(before, now) == [
        "a.b.1 was 2 and is 3",
        "a.gone was None and is not there",
        "a.b.2 was not there and is 4",
    ]


TOKENS = torch.arange(6)[None]
OTHERS = {
    "a value": [Call((TOKENS + 1,))],
    "a shape": [Call((TOKENS.reshape(2, 3),))],
    "a dtype": [Call((TOKENS.float(),))],
    "a name": [Call((), {"input_ids": TOKENS})],
    "more": [Call((TOKENS,)), Call((TOKENS,))],
    "a plain argument": [Call((TOKENS,), {"flag": True})],
}


@pytest.mark.parametrize("other", OTHERS)
def test_data_that_differ_in_anything_have_another_digest(other: str) -> None:
    assert _identity_of_data(OTHERS[other]) != _identity_of_data([Call((TOKENS,))])
    assert _identity_of_data([Call((TOKENS.clone(),))]) == _identity_of_data([Call((TOKENS,))])


def test_the_strides_of_data_do_not_count() -> None:
    assert _identity_of_data([Call((TOKENS.expand(2, 6),))]) == _identity_of_data([Call((TOKENS.repeat(2, 1),))])
