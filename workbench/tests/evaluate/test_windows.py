"""Text cut into windows: which tokens, how many, with or without a BOS."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.errors import ConfigError
from quark_workbench.evaluate import token_windows


class Letters:
    """A tokenizer whose tokens are code points; with ``bos`` it puts 0 before every text, as Llama's does."""

    bos_token_id = 0

    def __init__(self, *, bos: bool = False) -> None:
        self.bos = bos
        self.seen = 0

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        self.seen = max(self.seen, len(text))
        return {"input_ids": [0] * (self.bos and add_special_tokens) + [ord(c) for c in text]}


texts = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=60)


@given(texts, st.integers(2, 8))
def test_windows_joined_are_the_text_without_its_tail(text: str, length: int):
    windows = token_windows(Letters(), text, length)
    assert windows.shape == (len(text) // length, length)
    assert "".join(map(chr, windows.flatten().tolist())) == text[: len(text) // length * length]


@given(texts, st.integers(2, 8))
def test_every_window_begins_with_bos_where_the_tokenizer_does(text: str, length: int):
    windows = token_windows(Letters(bos=True), text, length)
    assert windows.shape == (len(text) // (length - 1), length)
    assert (windows[:, 0] == 0).all()
    assert "".join(map(chr, windows[:, 1:].flatten().tolist())) == text[: windows[:, 1:].numel()]


def test_a_limit_keeps_the_first_windows_and_spares_the_rest_of_the_text():
    tokenizer = Letters()
    windows = token_windows(tokenizer, "abcdefgh" * 1000, 4, limit=3)
    assert windows.tolist() == token_windows(Letters(), "abcdefghabcd", 4).tolist()
    assert tokenizer.seen < 200


def test_no_token_is_of_a_word_that_the_limit_has_cut():
    class Words(Letters):
        """A tokenizer whose tokens are words, each told by its length."""

        def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
            return {"input_ids": [len(word) for word in text.split()]}

    # Two tokens are wanted, and eight characters for each would end in the middle of the second word.
    assert token_windows(Words(), "ten.chars. fourteen.chars. and a rest", 2, limit=1).tolist() == [[10, 15]]


def test_a_text_that_ends_before_the_limit_gives_what_it_has():
    assert len(token_windows(Letters(), "abcdefgh", 4, limit=100)) == 2


@pytest.mark.parametrize(
    ("text", "length", "limit", "says"),
    [
        ("some text", 1, None, "at least 2"),
        ("some text", -5, None, "at least 2"),
        ("some text", 4, 0, "at least 1"),
        (" \n", 4, None, "empty"),
        ("abc", 4, None, "3 tokens, fewer than one window of 4"),
    ],
)
def test_what_gives_no_window_is_refused(text: str, length: int, limit: int | None, says: str):
    with pytest.raises(ConfigError, match=says):
        token_windows(Letters(), text, length, limit)
