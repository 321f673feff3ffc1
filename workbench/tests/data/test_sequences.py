"""Sequences of calibration tokens made of samples."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.errors import CalibrationError
from quark_tiny_model import held_out_text, tiny_tokenizer
from quark_workbench.data import token_sequences

TOKENIZER = tiny_tokenizer()
CHAT = [{"role": "user", "content": "Who made the heaven?"}, {"role": "assistant", "content": "God."}]


def tokens_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text)["input_ids"]
    return ids


def flat(batches: list[Any]) -> list[int]:
    return torch.cat([batch.flatten() for batch in batches]).tolist()


def test_calibration_sequences_are_the_beginning_of_the_text_one_after_another() -> None:
    text = held_out_text()[:2000]
    batches = token_sequences(TOKENIZER, [text], count=5, length=7)
    assert [batch.shape for batch in batches] == [(1, 7)] * 5
    assert flat(batches) == tokens_of(text)[:35]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), length=st.integers(1, 16), count=st.integers(1, 8))
def test_packing_keeps_every_token_in_order(lengths: list[int], length: int, count: int) -> None:
    text = held_out_text()
    samples = [text[100 * i : 100 * i + n] for i, n in enumerate(lengths)]
    tokens = [token for sample in samples for token in tokens_of(sample)]
    batches = token_sequences(TOKENIZER, samples, count, length)
    assert flat(batches) == tokens[: count * length]
    assert all(batch.shape == (1, length) for batch in batches[:-1])


def test_no_more_samples_are_read_than_are_needed() -> None:
    read = []

    def samples() -> Any:
        for number in range(100):
            read.append(number)
            yield held_out_text()[:200]

    token_sequences(TOKENIZER, samples(), count=2, length=8)
    assert len(read) <= 2


def test_without_packing_a_sequence_is_the_beginning_of_one_sample() -> None:
    text = held_out_text()
    batches = token_sequences(TOKENIZER, [text[:5], text[100:400]], count=2, length=8, packing=False)
    assert [batch.tolist() for batch in batches] == [[tokens_of(text[:5])[:8]], [tokens_of(text[100:400])[:8]]]


def test_a_batch_of_sequences_that_differ_in_length_has_a_mask() -> None:
    text = held_out_text()
    (batch,) = token_sequences(TOKENIZER, [text[:5], text[100:400]], count=2, length=8, packing=False, batch_size=2)
    short = len(tokens_of(text[:5]))
    assert short < 8
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].sum(1).tolist() == [short, 8]
    assert batch["input_ids"][0, :short].tolist() == tokens_of(text[:5])


def test_a_seed_shuffles_samples_the_same_way_each_time() -> None:
    samples = [held_out_text()[100 * i : 100 * i + 60] for i in range(20)]
    one, again, other = (flat(token_sequences(TOKENIZER, samples, 4, 8, packing=False, seed=seed)) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert one != flat(token_sequences(TOKENIZER, samples, 4, 8, packing=False))


def test_a_seed_draws_windows_of_a_single_text() -> None:
    text = held_out_text()[:4000]
    windows = {tuple(row) for row in torch.tensor(tokens_of(text)).unfold(0, 8, 8).tolist()}
    drawn = token_sequences(TOKENIZER, [text], 4, 8, seed=3)
    assert {tuple(batch[0].tolist()) for batch in drawn} <= windows
    assert flat(drawn) != tokens_of(text)[:32]


def test_chats_go_through_the_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(CalibrationError, match="no chat template"):
        token_sequences(tokenizer, [CHAT], 1, 64)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    (batch,) = token_sequences(tokenizer, [CHAT], 1, 64)
    assert tokenizer.decode(batch[0]) == "<user> Who made the heaven? <assistant> God. "
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(CalibrationError, match="refuses a chat"):
        token_sequences(tokenizer, [CHAT], 1, 64)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"count": 0}, "count=0"), ({"length": 0}, "length=0"), ({"batch_size": -1}, "batch_size=-1"), ({"samples": []}, "no tokens")],
)
def test_what_gives_no_data_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        token_sequences(TOKENIZER, **{"samples": ["a text"], "count": 1, "length": 4, **arguments})


def test_a_checkpoint_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(CalibrationError, match="no tokenizer"):
        token_sequences(None, ["a text"])


def test_a_text_longer_than_the_context_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 8
    token_sequences(tokenizer, [held_out_text()[:2000]], count=5, length=7)
    assert caplog.records == [], "the text is cut into sequences that the model reads"
