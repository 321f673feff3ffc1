"""Checkpoints of several kinds of model: which Auto class loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from quark.hf.loading import auto_class, calibration_tokens, model_config
from quark.testing.tiny import held_out_text, tiny_tokenizer


@pytest.mark.parametrize(
    ("model_type", "named", "wanted"),
    [
        ("llama", None, AutoModelForCausalLM),
        ("mistral3", None, AutoModelForImageTextToText),
        ("mllama", ["MllamaForConditionalGeneration"], AutoModelForImageTextToText),
        ("mllama", ["MllamaForCausalLM"], AutoModelForCausalLM),
        ("qwen3_5", ["Qwen3_5ForConditionalGeneration"], AutoModelForImageTextToText),
        ("qwen3_5", ["OfSomeoneElse"], AutoModelForCausalLM),
        ("vit", ["ViTModel"], AutoModelForCausalLM),
    ],
)
def test_the_architecture_that_a_config_names_decides_and_text_comes_first(model_type: str, named: list[str] | None, wanted: type) -> None:
    config = AutoConfig.for_model(model_type, architectures=named)
    assert auto_class(config) is wanted


def test_what_is_named_in_a_file_decides_as_well(tmp_path: Path) -> None:
    AutoConfig.for_model("mllama", architectures=["MllamaForConditionalGeneration"]).save_pretrained(tmp_path)
    assert auto_class(model_config(tmp_path)) is AutoModelForImageTextToText


def test_calibration_sequences_are_the_beginning_of_the_text_one_after_another(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(held_out_text()[:2000], encoding="utf-8")
    tokens = tiny_tokenizer()(text.read_text(encoding="utf-8"))["input_ids"]
    found = calibration_tokens(tiny_tokenizer(), text, count=5, length=7)
    assert [batch.shape for batch in found] == [(1, 7)] * 5
    assert torch.cat(found, dim=1).tolist() == [tokens[:35]]
