"""The config of a checkpoint: refused values, and narrower copies."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, modeling_flash_attention_utils

from quark.base.version import transformers_version
from quark.errors import CheckpointError, EnvironmentConflictError, UnsupportedError
from quark.models.hf.model_config import _EXPERTS_OF_A_HUB, _PACKAGE_OF_ATTENTION, model_config
from quark.models.hf.skeleton import meta_model


@pytest.mark.parametrize("damaged", ["[[1]]", '{"a": 1}', "7"])
def test_a_model_type_that_is_no_name_is_damage(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": {damaged}}}')
    with pytest.raises(CheckpointError, match=r"config\.json' is damaged, because its model_type is .* instead of a name"):
        model_config(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [("qwen2_moe", {"shared_expert_intermediate_size": 20480}), ("gemma4_text", {"vocab_size_per_layer_input": 262_144})],
)
def test_widths_are_no_numbers_of_layers_and_may_be_large(model_type: str, values: dict[str, int], tmp_path: Path) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers_version()} has no {model_type}")
    AutoConfig.for_model(model_type, **values).save_pretrained(tmp_path)
    assert all(getattr(model_config(tmp_path), name) == value for name, value in values.items())


@pytest.mark.parametrize("name", ["num_hidden_layers", "encoder_depth"])
def test_more_layers_than_any_model_has_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "qwen2_moe", "{name}": 1000000000}}')
    with pytest.raises(CheckpointError, match=rf"says {name} = 1,000,000,000, but no model has more than"):
        model_config(tmp_path)


def test_experts_may_be_as_many_as_the_weights_have_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_moe", "num_experts": 20000}')
    assert model_config(tmp_path).num_experts == 20_000
    (tmp_path / "model.safetensors").write_bytes(bytes(20_000))
    assert model_config(tmp_path).num_experts == 20_000
    (tmp_path / "model.safetensors").write_bytes(bytes(19_999))
    with pytest.raises(CheckpointError, match=r"says num_experts = 20,000, but the weights have only 19,999 bytes"):
        model_config(tmp_path)


@pytest.mark.parametrize("damaged", ['"LlamaForCausalLM"', "[7]", '{"LlamaForCausalLM": 1}'])
def test_architectures_that_are_no_list_of_names_are_damage(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "architectures": {damaged}}}')
    with pytest.raises(CheckpointError, match=r"instead of a list of names|cannot be read|it is damaged"):
        model_config(tmp_path)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_an_attention_whose_package_is_missing_is_told_with_its_key(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: "flash_attention_2"}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentConflictError, match=rf"asks for the attention 'flash_attention_2', but flash-attn is not .*{key}"):
        model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: "sdpa"}))
    assert model_config(tmp_path).model_type == "llama"


@pytest.mark.parametrize("values", [{"hidden_size": 65, "num_attention_heads": 4}, {"hidden_size": "x"}, {"num_attention_heads": 0}])
def test_values_that_no_model_has_are_not_called_damage(values: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **values}))
    with pytest.raises(CheckpointError, match="correct them, or fetch the file again") as caught:
        meta_model(tmp_path)
    assert "damaged" not in str(caught.value)


def test_an_activation_that_nobody_knows_is_not_called_damage(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_act": "of_someone_else"}))
    with pytest.raises(CheckpointError, match="no model can be built from its values; correct them"):
        meta_model(tmp_path)


FETCHED = [
    {"attn_implementation": "evil/kern"},
    {"_attn_implementation": "kernels-community/flash-attn2@0123"},
    {"_attn_implementation_internal": "evil/kern"},
    {"attn_implementation": "paged|evil/kern:forward"},
    {"attn_implementation": {"": "eager", "text_config": {"": "evil/kern"}}},
    {"experts_implementation": "evil/kern"},
    {"_experts_implementation": {"text_config": "evil/kern"}},
    {"experts_implementation": "sonicmoe"},
    {"experts_implementation": "deepgemm"},
    {"linear_attn_implementation": "evil/kern"},
    {"backbone": "evil/model"},
    {"architecture": "hf-hub:evil/model"},
]


@pytest.mark.parametrize(
    "nest", [lambda v: v, lambda v: {"text_config": v}, lambda v: {"parts": [{"deep": v}]}], ids=["top", "part", "list"]
)
@pytest.mark.parametrize("values", FETCHED, ids=str)
def test_code_of_a_hub_is_refused_unless_it_is_trusted(values: dict[str, Any], nest: Any, tmp_path: Path) -> None:
    (key,) = values
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **nest(values)}))
    with pytest.raises(
        UnsupportedError, match=rf"says {key} = .*, which is code or a model on a hub.*Remove \"{key}\" .*--trust-remote-code"
    ):
        model_config(tmp_path)
    with suppress(CheckpointError):  # what transformers says of it is its own matter
        model_config(tmp_path, trust_remote_code=True)


def test_every_name_for_which_transformers_fetches_a_kernel_is_known() -> None:
    """If transformers fetched kernels for other names, a config.json could ask for them."""
    from transformers.integrations import moe

    fetching = {name for name, function in moe.ALL_EXPERTS_FUNCTIONS._global_mapping.items() if function.__module__ != moe.__name__}
    assert fetching <= set(_EXPERTS_OF_A_HUB)
    fallbacks = getattr(modeling_flash_attention_utils, "FLASH_ATTN_KERNEL_FALLBACK", {})
    assert fallbacks.keys() <= _PACKAGE_OF_ATTENTION.keys()


@pytest.mark.parametrize("attention", [*_PACKAGE_OF_ATTENTION, "paged|flash_attention_2"])
@pytest.mark.parametrize("part", [None, "vision_config"])
def test_an_attention_without_its_package_fetches_no_kernel(
    part: str | None, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"attn_implementation": attention}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **(values if part is None else {part: values})}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentConflictError, match="is not installed"):
        model_config(tmp_path)
