"""The word error rate: which words count, which errors, and the spread over sentences."""

from __future__ import annotations

import math
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark_workbench.data.processor import load_processor
from quark_workbench.evaluate.sample_windows import SampleWindow
from quark_workbench.evaluate.word_error_rate import rate_difference, transcripts, word_error_rate, word_errors, words_of
from tests.kit.media_models import media_checkpoint


def test_case_and_punctuation_do_not_count() -> None:
    assert words_of("  It’s “well-known”: ÄRGER — isn't\nit? €5 ") == ["its", "well", "known", "ärger", "isnt", "it", "5"]
    assert word_errors("HELLO... World", "hello, world!") == (0, 2)


@pytest.mark.parametrize(
    ("transcript", "text", "errors"),
    [("", "a b c", 3), ("a b c", "", 3), ("a x c", "a b c", 1), ("a c", "a b c", 1), ("a b b c", "a b c", 1), ("b c a", "a b c", 2)],
)
def test_errors_are_words_to_replace_insert_or_delete(transcript: str, text: str, errors: int) -> None:
    assert word_errors(transcript, text) == (errors, len(text.split()))


def test_errors_are_the_fewest() -> None:
    """Beside the recursive definition of Levenshtein's distance."""
    draw = random.Random(0)
    for _ in range(50):
        own, right = (tuple(draw.choices("abc", k=draw.randint(0, 6))) for _ in range(2))

        @cache
        def distance(i: int, j: int, own: tuple[str, ...] = own, right: tuple[str, ...] = right) -> int:
            if not i or not j:
                return i + j
            return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (own[i - 1] != right[j - 1]))

        assert word_errors(" ".join(own), " ".join(right))[0] == distance(len(own), len(right))


def test_the_rate_is_of_all_words_and_not_a_mean_of_sentences() -> None:
    assert word_error_rate([(1, 1), (0, 9)]).value == 0.1
    assert word_error_rate([(3, 2)]) == word_error_rate([(3, 2)])
    assert word_error_rate([(3, 2)]).error is None
    with pytest.raises(ConfigError, match="have no words"):
        word_error_rate([(1, 0), (0, 0)])


def test_the_standard_error_is_that_of_a_mean_if_sentences_have_one_length() -> None:
    draw = random.Random(1)
    errors = [(draw.randint(0, 5), 10) for _ in range(200)]
    rates = [wrong / 10 for wrong, _ in errors]
    mean = sum(rates) / 200
    known = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / 199 / 200)
    measured = word_error_rate(errors)
    assert measured.value == pytest.approx(mean)
    assert measured.error == pytest.approx(known, rel=0.15)  # 1,000 resamples: a deviation of 2 %


def test_a_difference_is_paired_by_sentence() -> None:
    draw = random.Random(2)
    others = [(draw.randint(0, 9), 10) for _ in range(50)]
    errors = [(wrong + 1, words) for wrong, words in others]
    difference = rate_difference(errors, others)
    assert difference.value == pytest.approx(0.1)
    assert difference.error == pytest.approx(0, abs=1e-9)
    assert (word_error_rate(errors).error or 0) > 0.01


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ("H H E L <pad> L L O O | | W <pad> <pad> E", "HELLO WE"),
        ("A <s> A <unk> | <pad> | B </s>", "AA  B"),
        ("<pad> <pad>", ""),
    ],
)
def test_frames_spell_words(frames: str, text: str, tmp_path: Path) -> None:
    """One of equal letters in a row stays; blanks part equal letters, and other special tokens are blanks."""
    processor = load_processor(media_checkpoint("Wav2Vec2ForCTC", tmp_path))
    ids = torch.tensor(processor.tokenizer.convert_tokens_to_ids(frames.split()))

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, input_values: Tensor) -> Any:
            return SimpleNamespace(logits=nn.functional.one_hot(ids, 32)[None].float())

    window = SampleWindow(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), None, {"input_values": torch.zeros(1, 800)})
    assert transcripts(Frames(), processor, [window], [None]) == [text]
