"""Models that give no probabilities of next tokens are compared by their outputs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    ViTConfig,
    ViTModel,
)

from quark.errors import ConfigError, UnsupportedError
from quark_workbench.commands.evaluation import evaluate_windows
from quark_workbench.commands.evaluation_lines import result_lines
from quark_workbench.evaluate import Windows
from quark_workbench.evaluate.outputs import compare_outputs, gives_next_tokens

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
BART = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
TOKENS = torch.arange(3, 27).reshape(3, 8)
WINDOWS = Windows(TOKENS, torch.ones(3, dtype=torch.long))

MODELS: dict[str, tuple[nn.Module, dict[str, int]]] = {
    "base": (BertModel(BertConfig(**SMALL)), {"last_hidden_state": 24, "pooler_output": 3}),
    "masked": (BertForMaskedLM(BertConfig(**SMALL)), {"logits": 24}),
    "classifier": (LlamaForSequenceClassification(LlamaConfig(**SMALL)), {"logits": 3}),
    "both": (BartForConditionalGeneration(BartConfig(**BART)), {"logits": 24, "encoder_last_hidden_state": 24}),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_of_a_model_are_compared_with_those_of_its_reference(name: str) -> None:
    model, vectors_of = MODELS[name]
    model.eval()
    assert not gives_next_tokens(model)
    same = compare_outputs(model, model, WINDOWS.split(2))
    assert set(vectors_of) <= set(same)
    for output, vectors in vectors_of.items():
        assert same[output].vectors == vectors
        assert (same[output].cosine, same[output].relative_error) == (pytest.approx(1.0), 0.0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    changed = compare_outputs(other, model, WINDOWS.split(2))
    assert all(changed[output].lowest_cosine <= changed[output].cosine < 1 for output in vectors_of)
    assert all(changed[output].relative_error > 0 for output in vectors_of)


def test_a_decoder_gives_next_tokens_and_what_takes_no_tokens_is_refused() -> None:
    assert gives_next_tokens(LlamaForCausalLM(LlamaConfig(**SMALL)))
    images = ViTModel(
        ViTConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    )
    with pytest.raises(UnsupportedError, match="a ViTModel takes pixel_values, not token ids"):
        compare_outputs(images, images, [WINDOWS])


def test_the_command_compares_outputs_or_says_why_there_is_no_perplexity(tmp_path: Path) -> None:
    MODELS["base"][0].save_pretrained(tmp_path)  # type: ignore[operator]
    where: dict[str, Any] = {"device": "cpu", "dtype": "auto", "trust_remote_code": False, "packed": False}
    with pytest.raises(ConfigError, match=r"a BertModel does not predict tokens, .* give --reference MODEL"):
        evaluate_windows((tmp_path, None), [WINDOWS], [], where, by_block=False)
    with pytest.raises(UnsupportedError, match="leave out --by-block"):
        evaluate_windows((tmp_path, tmp_path), [WINDOWS], [], where, by_block=True)
    result = evaluate_windows((tmp_path, tmp_path), [WINDOWS], [], where, by_block=False)
    lines = result_lines(result | {"model": "m", "windows": 3, "seq_len": 8, "seconds": 1.0})
    assert lines[1].startswith("last_hidden_state: cosine 1.00000, at least 1.00000, relative error 0.00000")
