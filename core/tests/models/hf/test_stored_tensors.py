"""`quark.models.hf.stored_tensors`: recipes for a transformers model's tensors, and refused checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.core_model_loading import ConversionOps, WeightConverter

from quark.config.model import QConfig
from quark.errors import CheckpointError
from quark.models.hf.shards import check_shards
from quark.models.hf.skeleton import skeleton
from quark.models.hf.stored_tensors import Recipe, StoredTensors
from quark.models.plan.mixtures import separate_experts
from quark.plugins import schemes
from quark_tiny_model import tiny_model, tiny_model_dir

CPU = torch.device("cpu")
LAYER = "model.layers.0.mlp.up_proj.weight"


def opened(directory: Path) -> StoredTensors:
    return StoredTensors(skeleton(directory, "auto", CPU), check_shards(directory), directory)


def values(stored: StoredTensors, dtype: torch.dtype) -> dict[str, Tensor]:
    dtype_of = {target: dtype for recipe in stored.recipes for target in recipe.targets}
    return {name: tensor.clone() for name, tensor in stored.read(stored.recipes, dtype_of, CPU)}


def changed(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """The bundled checkpoint with its tensors changed."""
    shutil.copytree(tiny_model_dir(), directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_tensors_of_a_plain_checkpoint_are_read_as_they_are_stored_in_the_dtype_asked_for() -> None:
    expected = load_file(tiny_model_dir() / "model.safetensors")
    read = values(opened(tiny_model_dir()), torch.float32)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name].float()) for name in expected)


def test_experts_that_are_stored_one_by_one_are_joined_as_transformers_does(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=11))
    model.save_pretrained(tmp_path)
    stored = opened(tmp_path)
    joined = [recipe for recipe in stored.recipes if recipe.conversion is not None]
    assert {len(recipe.sources) for recipe in joined} == {11, 22}, "experts are stored one by one"
    read, expected = values(stored, torch.float32), model.state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_conversions_see_the_model_as_transformers_knows_it_when_its_experts_are_separate(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    text = {**sizes, "vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
    vision = {"hidden_size": 32, "num_heads": 2, "depth": 1, "intermediate_size": 64, "out_hidden_size": 32, "deepstack_visual_indexes": []}
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    published = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(published, tmp_path / "model.safetensors", {"format": "pt"})
    empty = skeleton(tmp_path, "auto", CPU)
    stored = StoredTensors(empty, check_shards(tmp_path), tmp_path)
    assert separate_experts(empty, QConfig(schemes().load_config("int4_wo_per_channel")()))
    read, expected = values(stored, torch.float32), model.state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(LAYER), rf"lacks 1 tensor\(s\) of a LlamaForCausalLM: {LAYER}"),
        (lambda t: t.update({LAYER: t[LAYER][1:].clone()}), "gets the shape .* do not belong together"),
        (lambda t: t.update({LAYER: t[LAYER].to(torch.int8)}), f"holds '{LAYER}' as int8, but the model has floating-point numbers"),
        (lambda t: t.update({LAYER: t[LAYER].to(torch.float8_e4m3fn)}), f"holds '{LAYER}' as F8_E4M3"),
    ],
    ids=["missing", "other shape", "integers", "codes"],
)
def test_checkpoints_that_do_not_fit_the_model_are_refused(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(changed(tmp_path / "changed", change))


def test_a_stored_tensor_without_a_place_in_the_model_is_carried_over_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = changed(tmp_path / "changed", lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(2)}))
    assert opened(source).carried == ("model.layers.0.extra.weight",)
    assert "1 tensor(s) that a LlamaForCausalLM has no place for: model.layers.0.extra.weight" in caplog.text


def test_a_stored_tensor_whose_place_another_has_taken_is_refused(tmp_path: Path) -> None:
    source = changed(tmp_path / "changed", lambda t: t.update({"norm.weight": torch.zeros(256)}))
    with pytest.raises(CheckpointError, match=r"a LlamaForCausalLM has no place for 1 tensor\(s\).*: norm\.weight"):
        opened(source)


def test_a_stored_table_that_the_model_computes_is_left_out(tmp_path: Path) -> None:
    source = changed(tmp_path / "changed", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    opened(source)


class PassesOn(ConversionOps):
    """Returns its input in a list, as some conversions do with tensors that they do not convert."""

    def convert(self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Any]:
        (given,) = input_dict.values()
        return {target_patterns[0]: given if isinstance(given, list) else [given]}


def test_a_tensor_that_a_conversion_passes_on_is_that_tensor() -> None:
    conversion = WeightConverter("old.weight", "new.weight", operations=[PassesOn()])
    recipe = Recipe((("old.weight", "layers.0.old.weight"),), ("layers.0.new.weight",), conversion)
    x = torch.ones(2, 3)
    made = recipe.make({"layers.0.old.weight": x}, tiny_model(blocks=1))
    assert made.keys() == {"layers.0.new.weight"}
    assert torch.equal(made["layers.0.new.weight"], x)
