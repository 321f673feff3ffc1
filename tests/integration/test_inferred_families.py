"""Families without a template: what is inferred of them suffices for calibrated rounding, in memory and from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from quark.checkpoint.export import export_with
from quark.models.hf.loading import load_model
from quark.models.hf.skeleton import meta_model
from quark.models.plan.family import template_of
from quark.models.plan.inferred_architecture import infer_architecture
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark_devkit.whole_runs import contents

DATA = [torch.randint(3, 60, (1, 16), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
}
FAMILIES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "NemotronHConfig": (
        "NemotronHForCausalLM",
        {
            **{"layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16},
            **{"n_groups": 1, "chunk_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            **{"moe_shared_expert_intermediate_size": 64, "n_shared_experts": 1},
        },
        {"mixer.in_proj", "mixer.out_proj", "mixer.q_proj", "mixer.o_proj", "mixer.shared_experts.up_proj"},
    ),
    "Gemma3nTextConfig": (
        "Gemma3nForCausalLM",
        {
            **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 32, "laurel_rank": 32, "altup_num_inputs": 2},
            **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "sliding_window": 8},
            **{"activation_sparsity_pattern": [0.0] * 4},
        },
        {"self_attn.q_proj", "mlp.down_proj", "laurel.linear_left", "per_layer_projection"},
    ),
    "HunYuanMoEV1Config": (
        "HunYuanMoEV1ForCausalLM",
        {"num_experts": 4, "moe_topk": 2},
        {"self_attn.q_proj", "self_attn.o_proj", "mlp.experts.0.gate_proj", "mlp.shared_mlp.up_proj"},
    ),
}
"""Model class, sizes of its own, and some layers of its blocks, by configuration class."""


def source_of(family: str, directory: Path) -> Path:
    if not hasattr(transformers, family):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    name, own, _ = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, family)(**SIZES, **own))
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("algorithm", ["gptq", "qronos"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_layers_of_the_blocks_are_rounded_by_the_algorithm(family: str, algorithm: str, tmp_path: Path) -> None:
    source = source_of(family, tmp_path / "source")
    config = template_of(meta_model(source)).get_config(scheme="int4_wo_32", algorithm=[algorithm])
    config.exclude = [*config.exclude, "*altup*"]  # of Gemma 3n: two columns, which no group of 32 divides
    model = ModelQuantizer(config).quantize_model(load_model(source), DATA)
    rounded = {row.name for row in model.quark_plan.quantized}
    assert {row.algorithm for row in model.quark_plan.quantized} == {algorithm}
    inside = {name.split(".", 3)[3] for name in rounded}
    assert inside >= FAMILIES[family][2]
    export_with("safetensors", model, tmp_path / "memory")
    quantize_checkpoint(source, tmp_path / "disk", config, DATA)
    assert contents(tmp_path / "memory") == contents(tmp_path / "disk")
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "disk").eval()
        assert torch.equal(loaded(DATA[0]).logits, model(DATA[0]).logits)


def test_lists_of_linear_layers_are_no_blocks(tmp_path: Path) -> None:
    model = meta_model(source_of("Gemma3nTextConfig", tmp_path))
    found = infer_architecture(model, "gemma3n_text")
    assert found is not None
    assert found.block_lists == ("model.layers",)
    assert {"model.altup_projections.0", "model.altup_unembed_projections.0"} <= set(found.exclude_layers_name)
