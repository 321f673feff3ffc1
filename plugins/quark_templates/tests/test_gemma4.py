"""Gemma 4's variants: embeddings for each block, keys and values of earlier blocks, keys that are values.

Read back to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_templates.examples import sizes_of

from .lacking_families import why_lacking
from .own_forms import IDS, logits

pytestmark = pytest.mark.skipif(why_lacking("gemma4_unified") is not None, reason=str(why_lacking("gemma4_unified")))

SMALL: dict[str, Any] = {  # such as E2B: later blocks take keys and values of the last block of their kind that has some
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 64,
    "enable_moe_block": False,
}
LARGE: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}  # such as 26B-A4B


def model_with(model_type: str, variant: dict[str, Any]) -> nn.Module:
    sizes = sizes_of(model_type)
    config = AutoConfig.for_model(model_type, **{**sizes, "text_config": {**sizes["text_config"], **variant}, "tie_word_embeddings": True})
    kind = getattr(transformers, f"Gemma4{'' if model_type == 'gemma4' else 'Unified'}ForConditionalGeneration")
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    return model


@pytest.mark.parametrize(("model_type", "variant"), [("gemma4", SMALL), ("gemma4", LARGE), ("gemma4_unified", LARGE)], ids=str)
@pytest.mark.parametrize(("scheme", "algorithm"), [("fp8", None), ("int4_wo_32", ["awq", "gptq"])], ids=str)
def test_a_variant_is_quantized_and_read_back(
    model_type: str, variant: dict[str, Any], scheme: str, algorithm: list[str] | None, tmp_path: Path
) -> None:
    float_model = model_with(model_type, variant)
    expected = logits(float_model)
    cache = {"kv_cache_scheme": "fp8"} if scheme == "fp8" else {}
    config = LLMTemplate.get(model_type).get_config(scheme, algorithm=algorithm, **cache)
    model = ModelQuantizer(config).quantize_model(float_model, list(IDS.split(1)))
    quantized = logits(model)
    assert not torch.equal(quantized, expected)
    assert float((quantized - expected).norm() / expected.norm()) < 0.5, "it is about the same model"
    export_safetensors(model, tmp_path)
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path)), quantized)
