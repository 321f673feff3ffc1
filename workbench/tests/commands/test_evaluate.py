"""``quark evaluate``: arguments that cannot be met are refused before a model is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import Gemma3Config
from typer.testing import CliRunner

from quark.errors import ConfigError, UnknownNameError
from quark_tiny_model import tiny_model_dir, tiny_tokenizer
from quark_workbench.cli.main import program


@pytest.mark.parametrize("options", [(), ("--by-block",)])
def test_an_unknown_metric_is_refused_before_weights_are_read(options: tuple[str, ...], tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model_dir(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UnknownNameError, match="no_such_metric"):
        CliRunner().invoke(program(), ["evaluate", str(model), "--metric", "no_such_metric", *options], catch_exceptions=False)


def test_the_context_of_a_multimodal_model_is_that_of_its_text_part(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma3Config(text_config=text | {"head_dim": 16, "vocab_size": 64, "max_position_embeddings": 48})
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"windows of 49 tokens exceed the context length of .* \(48\): use --seq-len 48 or less"):
        CliRunner().invoke(program(), ["evaluate", str(tmp_path), "--seq-len", "49"], catch_exceptions=False)
