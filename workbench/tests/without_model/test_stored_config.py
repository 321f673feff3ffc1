"""The values of a config.json, whatever model they are of."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.errors import CheckpointError
from quark.models.hf.internals import set_source, source_of
from quark_workbench.without_model.stored_config import StoredConfig

VALUES: dict[str, Any] = {
    **{"model_type": "acme", "architectures": ["AcmeForCausalLM"], "values": 3, "to_json_string": "text", "vocab_size": 7},
    **{"text_config": {"num_hidden_layers": 4, "torch_dtype": "bfloat16", "quantization_config": {}}, "quantization_config": {"a": 1}},
}


@pytest.fixture
def config(tmp_path: Path) -> StoredConfig:
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    return StoredConfig.read(tmp_path)


def test_values_are_attributes_and_missing_ones_are_none_of_them(config: StoredConfig) -> None:
    assert config.model_type == "acme"
    assert config.vocab_size == 7
    assert not hasattr(config, "is_encoder_decoder")
    assert config.get_text_config().num_hidden_layers == 4
    assert config.number("num_hidden_layers", "n_layer") == 4
    assert config.number("model_type", "hidden_size") is None


def test_what_is_written_is_what_was_read_without_its_quantization(config: StoredConfig) -> None:
    one = copy.deepcopy(config)
    set_source(one, "")
    one.architectures = ["Other"]
    one.dtype = torch.float32
    one.quantization_config = {"quant_method": "quark"}
    wanted = {
        **VALUES,
        "text_config": {"num_hidden_layers": 4, "torch_dtype": "bfloat16"},
        "quantization_config": {"quant_method": "quark"},
    }
    assert json.loads(one.to_json_string()) == wanted
    assert source_of(one) == ""
    assert source_of(config) != ""


def test_the_dtype_is_that_of_the_model_that_makes_text(config: StoredConfig) -> None:
    assert config.dtype is torch.bfloat16
    other = config.in_dtype(torch.float16)
    assert other.dtype is torch.float16
    assert json.loads(other.to_json_string())["text_config"]["torch_dtype"] == "float16"
    assert config.dtype is torch.bfloat16
    assert json.loads(StoredConfig({}).in_dtype(torch.float16).to_json_string()) == {"dtype": "float16"}


@pytest.mark.parametrize("dtype", ["int8", "no such", "device", 3])
def test_a_dtype_that_is_none_is_none(dtype: object) -> None:
    assert StoredConfig({"dtype": dtype}).dtype is None


@pytest.mark.parametrize("values", [{"model_type": 3}, {"architectures": "Acme"}, {"architectures": [3]}])
def test_values_of_other_types_are_refused(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="The file is damaged"):
        StoredConfig.read(tmp_path)


def test_a_head_is_tied_if_the_model_that_makes_text_says_so() -> None:
    assert StoredConfig({"text_config": {"tie_word_embeddings": False}}).ties_head() is False
    assert StoredConfig({"tie_word_embeddings": True}).ties_head() is True
    assert StoredConfig({}).ties_head() is None
