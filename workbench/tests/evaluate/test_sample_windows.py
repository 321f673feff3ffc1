"""The tokens of a text are scored, given its images or sounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers

from quark_workbench.data import read_samples
from quark_workbench.data.processor import load_processor
from quark_workbench.evaluate import compare, likelihood
from quark_workbench.evaluate.logits import next_token_logits
from quark_workbench.evaluate.sample_windows import sample_windows
from quark_workbench.evaluate.word_error_rate import transcripts
from tests.kit.media_models import media_checkpoint, write_images, write_sounds


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_text_after_an_image_is_scored_and_no_image(name: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    path = media_checkpoint(name, tmp_path / "model")
    processor = load_processor(path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
    (window,) = sample_windows(processor, read_samples(write_images(tmp_path / "data", 1)))
    tokens = window.tokens[0]
    last = int((tokens == 1024).nonzero()[-1])
    with torch.no_grad():
        predicted = next_token_logits(model, window)
        expected = model(**window.inputs).logits[0, last:-1]
    assert predicted.targets.tolist() == tokens[last + 1 :].tolist()
    assert torch.equal(predicted.logits, expected)
    nats = torch.nn.functional.cross_entropy(expected, predicted.targets)
    assert likelihood(model, [window]).perplexity.value == pytest.approx(math.exp(float(nats)), rel=1e-5)


def test_a_text_without_an_image_is_scored_whole(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    processor = load_processor(media_checkpoint("LlavaForConditionalGeneration", tmp_path / "model"))
    (window,) = sample_windows(processor, ["A text alone."])
    assert window.scored.all()


def test_spoken_words_are_scored_after_the_prompt(tmp_path: Path) -> None:
    path = media_checkpoint("WhisperForConditionalGeneration", tmp_path / "model")
    processor, samples = load_processor(path), list(read_samples(write_sounds(tmp_path / "data", 2)))
    model = transformers.WhisperForConditionalGeneration.from_pretrained(path).eval()
    windows = sample_windows(processor, samples)
    predicted = next_token_logits(model, windows[0])
    assert processor.tokenizer.decode(predicted.targets) == "In the beginning, 2 birds sang.<|endoftext|>"
    same = compare(model, model, windows)
    assert (same.mean_kl, same.tokens) == (0, sum(int(window.scored.sum()) for window in windows))
    other = transformers.WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16).eval()
    assert 0 < compare(other, model, windows).mean_kl < 0.1, "each model gets its own dtype"


def test_a_transcript_is_the_most_likely_token_after_token(tmp_path: Path) -> None:
    path = media_checkpoint("WhisperForConditionalGeneration", tmp_path / "model")
    processor, samples = load_processor(path), list(read_samples(write_sounds(tmp_path / "data", 2)))
    model = transformers.WhisperForConditionalGeneration.from_pretrained(path).eval()
    windows = sample_windows(processor, samples)
    for window, text in zip(windows, transcripts(model, processor, windows, samples), strict=True):
        tokens = torch.tensor([[model.config.decoder_start_token_id]])
        while tokens.shape[1] < 60 and (tokens.shape[1] < 2 or tokens[0, -1] != model.config.eos_token_id):
            logits = model(input_features=window.inputs["input_features"], decoder_input_ids=tokens).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax()[None, None]], dim=1)
        expected = processor.tokenizer.decode(tokens[0], skip_special_tokens=True)
        assert expected.startswith(text), "it ends at its largest length at the latest"
        assert len(text) > 40
