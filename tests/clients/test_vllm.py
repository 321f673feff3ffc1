"""vLLM loads our exports with its strict check for missing tensors, and computes the same as our own simulation.

Run with ``make clients VLLM_PYTHON=/path/to/python`` of an environment with vLLM; quark need not be installed
there. `vllm_comparison` says how results are compared.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Phi3Config, Qwen3Config

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_tiny_model import calibration_batches, tiny_model, tiny_tokenizer
from quark_workbench.mixed_precision import FLOAT, Budget, select_schemes

from .client_process import ClientError, ClientProcess
from .results import quantized_tiny_model
from .vllm_comparison import dtype_for, is_computed_by_vllm
from .vllm_on_cpu import generate, run, toward_zero

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1600)]
SCHEMES = ("int4_wo_128", "uint4_wo_64", "int8", "ptpc_fp8")
_ATTEND_TO_ONE = """
import sys, torch
from safetensors.torch import load_file, save_file
from vllm.platforms import current_platform
current_platform.import_kernels()
from vllm import _custom_ops as ops
value = load_file(sys.argv[1])["value"]  # [heads, 64]
heads, width = value.shape
caches = torch.zeros(1, heads, 64, width, dtype=torch.uint8).chunk(2, dim=2)
token = value.half()[None]
ops.cpu_attn_reshape_and_cache(token, token, *caches, torch.zeros(1, dtype=torch.int64), "vec", 1.0, 1.0, "fp8")
starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
plan = ops.cpu_attn_get_scheduler_metadata(
    1, heads, heads, width, lengths, torch.float16, starts, True, -1, "vec", False, None, "fp8"
)
out = torch.empty_like(token)
ops.cpu_attention_with_kv_cache(
    torch.zeros_like(token), *caches, out, starts, lengths, 1.0, True, None, -1, torch.zeros(1, 1, dtype=torch.int32), 0.0, plan, None,
    None, 1.0, 1.0, "fp8"
)
save_file({"cached": out[0].float()}, sys.argv[2])
"""


def test_vllm_on_a_cpu_rounds_what_it_caches_toward_zero(tmp_path: Path) -> None:
    """Attention over a single token gives its value as it was cached.

    Where this fails, vLLM may have come to round to nearest.
    """
    magnitudes = torch.exp2(torch.linspace(-10, 8.7, 512)).half().float()
    value = torch.cat([magnitudes, -magnitudes]).reshape(16, 64)
    save_file({"value": value}, tmp_path / "in")
    run(_ATTEND_TO_ONE, tmp_path, str(tmp_path / "in"), str(tmp_path / "out"))
    assert torch.equal(load_file(tmp_path / "out")["cached"], toward_zero(value))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_vllm_computes_what_our_simulation_computes_with_a_cache_in_fp8(scheme: str, vllm: ClientProcess, tmp_path: Path) -> None:
    """Without one: `test_vllm_layouts`."""
    export(quantized_tiny_model(scheme, torch.bfloat16, "fp8"), tmp_path / "out")
    is_computed_by_vllm(vllm, tmp_path / "out", "fp8", dtype_for(scheme))


@pytest.mark.xfail(
    torch.cpu._is_amx_tile_supported(),
    raises=ClientError,
    reason="vLLM 0.32's 4-bit kernel for CPUs with AMX asserts a name of zero points (w_zp_name), which symmetric weights have not",
    strict=True,
)
def test_vllm_loads_symmetric_4_bit_weights_in_bfloat16(vllm: ClientProcess, tmp_path: Path) -> None:
    export(ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_128")).quantize_model(tiny_model(torch.bfloat16)), tmp_path / "out")
    generate(vllm, tmp_path / "out", "auto", torch.bfloat16)


def test_a_scheme_for_each_layer_is_what_was_selected(vllm: ClientProcess, tmp_path: Path) -> None:
    names, data = ("ptpc_fp8", "int8", "bf16"), calibration_batches(4, 64)
    options = {"points": 3, "measured": 0}
    result = select_schemes(tiny_model(torch.bfloat16), names, Budget(bits=10), data, selector_options=options)
    assert len({FLOAT, *result.selection.choices.values()}) == len(set(result.selection.choices.values())) > 1
    export(ModelQuantizer(result.config).quantize_model(tiny_model(torch.bfloat16), data), tmp_path / "out")
    is_computed_by_vllm(vllm, tmp_path / "out", "auto", torch.bfloat16)


def test_keys_behind_a_norm_have_the_scale_of_what_is_cached(vllm: ClientProcess, tmp_path: Path) -> None:
    """The norm makes keys ten times as large; cached with the scale of the projection's outputs, nearly all of them would saturate."""
    config = LLMTemplate.get("qwen3").get_config(scheme="int8", kv_cache_scheme="fp8")
    export(ModelQuantizer(config).quantize_model(with_norms_of_heads(), calibration_batches(2, 128)), tmp_path / "out")
    is_computed_by_vllm(vllm, tmp_path / "out", "fp8", torch.bfloat16)


def test_keys_and_values_of_a_fused_projection_have_the_scales_of_what_is_cached(vllm: ClientProcess, tmp_path: Path) -> None:
    config = LLMTemplate.get("phi3").get_config(scheme="uint4_wo_64", kv_cache_scheme="fp8")
    config.separate_kv_scales = True
    export(ModelQuantizer(config).quantize_model(with_fused_projections(), calibration_batches(2, 128)), tmp_path / "out")
    is_computed_by_vllm(vllm, tmp_path / "out", "fp8", torch.float16)


def export(model: nn.Module, out: Path) -> None:
    export_safetensors(model, out)
    tiny_tokenizer().save_pretrained(out)


def with_norms_of_heads() -> nn.Module:
    """The bundled model as a Qwen3: queries and keys have norms."""
    tiny = tiny_model(torch.bfloat16)
    model: Any = AutoModelForCausalLM.from_config(Qwen3Config(**sizes(tiny, "head_dim")), dtype=torch.bfloat16).eval()
    assert all("_norm" in name for name in model.load_state_dict(tiny.state_dict(), strict=False).missing_keys)
    for block in model.model.layers:
        block.self_attn.k_norm.weight.data *= 10
        block.self_attn.q_norm.weight.data *= 0.05
    return model  # type: ignore[no-any-return]


def with_fused_projections() -> nn.Module:
    """The bundled model as a Phi-3: one matrix for queries, keys and values, and one for gate and up."""
    tiny = tiny_model(torch.bfloat16)
    model: Any = AutoModelForCausalLM.from_config(Phi3Config(**sizes(tiny)), dtype=torch.bfloat16).eval()
    state = dict(tiny.state_dict())
    for i in range(len(model.model.layers)):
        for fused, parts in (("self_attn.qkv", ("self_attn.q", "self_attn.k", "self_attn.v")), ("mlp.gate_up", ("mlp.gate", "mlp.up"))):
            weights = [state.pop(f"model.layers.{i}.{part}_proj.weight") for part in parts]
            state[f"model.layers.{i}.{fused}_proj.weight"] = torch.cat(weights)
    model.load_state_dict(state)
    return model  # type: ignore[no-any-return]


def sizes(model: Any, *more: str) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    others = ("max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(model.config, name) for name in (*names, *others, *more)}
