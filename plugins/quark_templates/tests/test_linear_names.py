"""GPT-2, BLOOM and Falcon.

Linear layers by other names, quantized in every kind of format, exported in the layout of their loaders.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quark.models.layers import QuantizedLayer, linear_weight
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors

FAMILIES = ("gpt2", "bloom", "falcon")
IDS = torch.arange(40).reshape(2, 20)


def tiny_model(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.float32).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def quantized(model_type: str, scheme: str, kv_cache_scheme: str | None = None) -> nn.Module:
    config = LLMTemplate.get(model_type).get_config(scheme, kv_cache_scheme=kv_cache_scheme)
    return ModelQuantizer(config).quantize_model(tiny_model(model_type), [IDS[:1]])


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(("scheme", "cache"), [("int4_wo_32", None), ("fp8", "fp8"), ("mxfp4", None), ("ptpc_fp8", None)])
def test_exports_reload_to_the_bit_here_and_in_transformers(model_type: str, scheme: str, cache: str | None, tmp_path: Path) -> None:
    model = quantized(model_type, scheme, cache)
    assert sum(isinstance(m, QuantizedLayer) for m in model.modules()) == 8
    export_safetensors(model, tmp_path / "out")
    expected = logits(model)
    assert expected.isfinite().all()
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected)


def test_codes_of_gpt2_are_stored_input_first_and_scales_output_first(tmp_path: Path) -> None:
    """So vLLM takes these layers as it takes any linear layer.

    It transposes every ``weight`` of these layers and nothing else.
    """
    model = quantized("gpt2", "mxfp4")
    export_safetensors(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc"
    assert stored[f"{name}.weight"].shape == (32 // 2, 128)
    assert stored[f"{name}.weight_scale"].shape == (128, 32 // 32)


def test_groups_of_gpt2_run_along_its_inputs() -> None:
    layer = quantized("gpt2", "mxfp4").get_submodule("transformer.h.0.attn.c_attn")
    assert isinstance(layer, QuantizedLayer)
    assert layer.weight_quantizer is not None
    assert layer.weight_quantizer.scale is not None
    float_weight = linear_weight(tiny_model("gpt2").get_submodule("transformer.h.0.attn.c_attn"))
    groups = float_weight.unflatten(1, (-1, 32))
    assert layer.weight_quantizer.scale.shape == groups.shape[:2]
    # The largest of a group lies between 4 and 8 steps, whose power of two is its scale (OCP MX, 6.3); it is
    # rounded by at most one.
    ratio = groups.abs().amax(-1) / layer.weight_quantizer.scale
    assert bool(((ratio >= 3.5) & (ratio <= 8)).all())


def test_rounded_values_are_written_in_the_layout_of_the_float_checkpoint(tmp_path: Path) -> None:
    model = quantized("gpt2", "int4_wo_32")
    export_safetensors(model, tmp_path / "out", weight_format="fake_quantized")
    layer = model.get_submodule("transformer.h.0.attn.c_attn")
    stored = load_file(tmp_path / "out" / "model.safetensors")["transformer.h.0.attn.c_attn.weight"]
    assert torch.equal(stored.t(), layer.weight)  # type: ignore[arg-type]
    # The weights of the model lie transposed in memory, those that are read do not: sums may be in another
    # order.
    torch.testing.assert_close(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))
