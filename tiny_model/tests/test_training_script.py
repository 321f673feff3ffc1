"""The script that makes the bundled model keeps its training text apart from the held-out text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quark_tiny_model import held_out_text

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "train_tiny_model.py"


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("tools/train_tiny_model.py")


def test_every_line_is_on_one_side_of_the_split(script: ModuleType):
    texts = ["".join(f"{name} {i:06d}\n" for i in range(40_000)) for name in "ab"]
    kept, held_out = (set(part.splitlines()) for part in script.split(texts))
    assert not kept & held_out
    assert kept | held_out == {line for text in texts for line in text.splitlines()}
    assert len(held_out) / (len(kept) + len(held_out)) == pytest.approx(1 / script.HELD_OUT_EVERY, rel=0.2)
    assert {line[0] for line in held_out} == {"a", "b"}


def test_a_unigram_model_of_even_frequencies_is_as_unsure_as_there_are_tokens(script: ModuleType):
    tokens = torch.arange(8).repeat(5)
    assert script.unigram_perplexity(tokens, tokens, 8) == pytest.approx(8)


def test_the_learning_rate_rises_then_falls_to_nothing(script: ModuleType):
    recipe = script.Recipe()
    rates = [script.rate(step, recipe) for step in range(recipe.steps + 1)]
    assert max(rates) == recipe.peak_rate == rates[recipe.warmup]
    assert rates[: recipe.warmup] == sorted(rates[: recipe.warmup])
    assert rates[recipe.warmup :] == sorted(rates[recipe.warmup :], reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_the_held_out_text_is_both_verse_and_wit():
    assert "LORD" in held_out_text()
    assert ", n." in held_out_text()
