"""The internals of transformers that this project uses exist and work: one test for each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
    modeling_utils,
)
from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeForCausalLM
from transformers.quantizers import quantizer_quark

from quark.config.layer import Slot
from quark.models.hf import internals
from quark_tiny_model import tiny_model

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 8,
}
LLAMA = AutoConfig.for_model("llama", **SMALL, pad_token_id=0, bos_token_id=0, eos_token_id=0)
MIXTURE = Qwen3MoeConfig(**SMALL, moe_intermediate_size=4, num_experts=2)


def test_model_classes_are_those_of_the_mapping_of_an_auto_class() -> None:
    assert internals.model_classes(AutoModelForCausalLM, LLAMA) == (LlamaForCausalLM,)
    assert internals.model_classes(AutoModelForImageTextToText, LLAMA) == ()


def test_tensors_that_a_class_keeps_in_float32_are_found_by_its_dtype_plan() -> None:
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 8}
    with torch.device("meta"):
        t5 = T5ForConditionalGeneration(T5Config(**small)).to(torch.float16)
        llama = LlamaForCausalLM(LLAMA).to(torch.float16)
    assert {name.rsplit(".", 2)[-2] for name in internals.kept_in_float32(t5, torch.float16)} == {"wo"}
    assert internals.kept_in_float32(llama, torch.float16) == []


def test_initialization_computes_what_is_not_persistent_and_leaves_the_rest() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA)
    model.model.norm.weight = nn.Parameter(torch.full((8,), 3.0))
    rotary = model.model.rotary_emb
    for name in list(rotary._buffers):
        rotary._buffers[name] = torch.full_like(rotary._buffers[name], torch.nan, device="cpu")
    state = torch.get_rng_state()
    internals.initialize_what_no_checkpoint_holds(model)
    assert torch.equal(rotary.inv_freq, LlamaForCausalLM(LLAMA).model.rotary_emb.inv_freq)
    assert model.model.norm.weight.tolist() == [3.0] * 8
    assert model.lm_head.weight.is_meta
    torch.set_rng_state(state)
    internals.initialize_what_no_checkpoint_holds(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_absent_tensors_are_computed_as_the_class_does_and_random_ones_are_left_out() -> None:
    small = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
    config = MarianConfig(**small, encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=8, max_position_embeddings=8, pad_token_id=0)
    with torch.device("meta"):
        model = MarianMTModel(config).eval()
    positions, bias, drawn = "model.encoder.embed_positions.weight", "final_logits_bias", "model.encoder.layers.0.fc1.weight"
    model.model.encoder.layernorm_embedding = nn.LayerNorm(8)
    model.model.encoder.layernorm_embedding.weight.data.fill_(3.0)
    internals.initialize_what_no_checkpoint_holds(model)
    state = torch.get_rng_state()
    computed = internals.compute_absent(model, [positions, bias, drawn], torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert computed.keys() == {positions, bias}
    assert torch.equal(computed[positions], MarianMTModel(config).state_dict()[positions])
    assert not computed[bias].any()
    assert all(model.state_dict(keep_vars=True)[name] is computed[name] for name in computed)
    assert isinstance(computed[positions], nn.Parameter)
    assert model.model.encoder.layernorm_embedding.weight.tolist() == [3.0] * 8
    assert model.model.shared.weight.is_meta


def test_without_initialization_no_random_number_is_drawn() -> None:
    state = torch.get_rng_state()
    with internals.without_initialization():
        LlamaForCausalLM(LLAMA)
    assert torch.equal(torch.get_rng_state(), state)
    LlamaForCausalLM(LLAMA)
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_config_says_where_it_was_loaded_from(tmp_path: Path) -> None:
    LLAMA.save_pretrained(tmp_path)
    assert internals.source_of(AutoConfig.from_pretrained(tmp_path)) == str(tmp_path)
    assert internals.source_of(LLAMA) == ""


@pytest.mark.posix("a cache of the hub has links, for which Windows wants a privilege")
def test_the_directory_of_a_name_of_a_hub_is_the_newest_version_with_those_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config, snapshots = AutoConfig.for_model("llama"), tmp_path / "models--somebody--Model" / "snapshots"
    config._name_or_path = "somebody/Model"
    assert internals.directory_of(config) is None
    (tmp_path / "blob").write_text("weights")
    for i, version in enumerate(("old", "new", "without")):
        (snapshots / version).mkdir(parents=True)
        (snapshots / version / "model.safetensors").symlink_to(tmp_path / "blob")
        if version != "without":
            (snapshots / version / "config.json").write_text("{}")
        os.utime(snapshots / version, (i, i))
    assert internals.directory_of(config) == snapshots / "new"
    config._commit_hash = "old"  # which transformers up to 5.17 says
    assert internals.directory_of(config) == snapshots / "old"
    del config._commit_hash
    (snapshots / "new" / "model-2.safetensors").write_text("more weights")
    assert internals.directory_of(config) is None


def test_the_directory_of_a_config_is_the_one_it_was_loaded_from_if_that_is_there(tmp_path: Path) -> None:
    assert internals.directory_of(LLAMA) is None
    LLAMA.save_pretrained(tmp_path / "once")
    loaded = AutoConfig.from_pretrained(tmp_path / "once")
    assert internals.directory_of(loaded) == tmp_path / "once"
    loaded._commit_hash = "0" * 40  # of a directory in a cache, given by its path
    assert internals.directory_of(loaded) == tmp_path / "once"
    (tmp_path / "once").rename(tmp_path / "twice")
    assert internals.directory_of(loaded) is None


def test_a_class_says_whether_its_attention_can_be_exchanged() -> None:
    class OwnAttention(LlamaForCausalLM):
        @classmethod
        def _can_set_attn_implementation(cls) -> bool:
            return False

    assert internals.can_set_attention(tiny_model())
    with torch.device("meta"):
        assert not internals.can_set_attention(OwnAttention(LLAMA))


def test_the_gate_of_experts_is_the_models_own_between_their_matrices() -> None:
    with torch.device("meta"):
        experts = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=4, num_experts=2))
    gate, up = torch.randn(2, 3, 4).unbind()
    assert torch.equal(internals.apply_gate(experts, [gate, up]), nn.functional.silu(gate) * up)


def test_stored_names_are_sorted_by_their_numbers_and_renamed_by_pattern() -> None:
    names = ["layers.10.a", "layers.9.a"]
    assert sorted(names, key=dot_natural_key) == names[::-1]
    state = {"model.layers.9.b": torch.ones(1)}
    assert rename_source_key("layers.9.a", [WeightRenaming(r"\.a$", ".b")], [], "model", state) == ("model.layers.9.b", None)


def test_the_loader_of_quark_checkpoints_looks_for_scales_of_one_level_in_submodules() -> None:
    names = internals.renamed_scales()
    assert {f"{slot.checkpoint_prefix}_{suffix}" for slot in Slot for suffix in ("scale", "zero_point")} == names
    assert not any(name.endswith("_2") for name in names)
    assert quantizer_quark.CHECKPOINT_KEYS["weight_scale"] == "weight_quantizer.scale"


def test_the_loader_takes_the_weight_of_an_expert_for_a_part_of_the_fused_experts() -> None:
    with torch.device("meta"):
        mixture, llama = Qwen3MoeForCausalLM(MIXTURE), LlamaForCausalLM(LLAMA)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert internals.renamed_by_loader(mixture)(name)
    assert not internals.renamed_by_loader(mixture)("model.layers.0.self_attn.q_proj.weight")
    assert not internals.renamed_by_loader(llama)(name)


def test_the_names_of_missing_tensors_are_told_once_before_these_get_memory(tmp_path: Path) -> None:
    class Watched(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            internals.on_missing(self, lambda missing, give_memory: told.append((self, missing, give_memory)))

    told: list[Any] = []
    tied = LlamaForCausalLM(AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True))
    state = {name: tensor for name, tensor in tied.state_dict().items() if name != "model.norm.weight"}
    tied.save_pretrained(tmp_path, state_dict=state)
    model = Watched.from_pretrained(tmp_path)
    assert [(found, missing) for found, missing, _ in told] == [(model, {"model.norm.weight", "lm_head.weight"})]
    assert model.model.norm.weight.is_meta
    told[0][2]()
    assert not model.model.norm.weight.is_meta
    assert model.lm_head.weight is model.model.embed_tokens.weight, "it is tied, and gets no memory of its own"
    assert "_move_missing_keys_from_meta_to_device" not in model.__dict__


def test_a_config_and_its_parts_say_the_same_source() -> None:
    config = Gemma3Config(text_config={"_name_or_path": "/elsewhere"}, name_or_path="/other")
    assert internals.source_of(config.text_config) == "/elsewhere"
    internals.set_source(config, "there")
    assert [internals.source_of(one) for one in (config, config.text_config, config.vision_config)] == ["there"] * 3


def test_files_are_read_and_not_mapped_in_the_body(tmp_path: Path) -> None:
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path)
    plain = modeling_utils.safe_open
    with internals.reading_files():
        model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert modeling_utils.safe_open is plain
    before = model.lm_head.weight.clone()
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(model.lm_head.weight, before)
