"""Checkpoints as DeepSeek-V3 is published.

FP8 in blocks of 128 x 128, ragged last blocks, experts one by one, a layer that predicts ahead.

The values are computed here in float64 by the rule of the model's card:
``weight[i, j] * weight_scale_inv[i // 128, j // 128]``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from quark.checkpoint import import_model_from_safetensors
from quark.checkpoint.inspection import inspect_checkpoint
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate

BLOCK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
LATENT = 128
"""Channels of the compressed keys and values. As published, 64 that turn come with them: `kv_a_proj_with_mqa`
ends in half a block.
"""


def codes_of(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return codes and scales of a matrix, and its values."""
    rows, columns = (-(-n // 128) for n in tensor.shape)
    codes, scale = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    values = torch.empty(tensor.shape, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = tensor[at].float().abs().max() / 448
            codes[at] = (tensor[at].float() / scale[i, j]).to(torch.float8_e4m3fn)
            values[at] = codes[at].double() * scale[i, j].double()
    return {name: codes, f"{name}_scale_inv": scale}, values.to(torch.float32).to(tensor.dtype)


def is_coded(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", ".gate.weight"))


@pytest.fixture(params=[64, 128], ids=["ragged", "whole blocks"])
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """The checkpoint with codes, and the one with their values in bfloat16."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=128,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=request.param,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=64,
    )
    config.num_nextn_predict_layers = 1
    DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "float")
    stored = load_file(tmp_path / "float/model.safetensors")
    predicting = torch.randn(128, 256).to(torch.bfloat16)  # transformers leaves this layer out
    stored["model.layers.61.eh_proj.weight"] = predicting
    codes: dict[str, Tensor] = {}
    for name, tensor in list(stored.items()):
        if is_coded(name, tensor):
            own, stored[name] = codes_of(name, tensor)
            codes |= own
        else:
            codes[name] = tensor
    text = json.loads((tmp_path / "float/config.json").read_text())
    for kind, tensors, more in (("codes", codes, {"quantization_config": BLOCK}), ("values", stored, {})):
        (tmp_path / kind).mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / kind / "model.safetensors", {"format": "pt"})
        (tmp_path / kind / "config.json").write_text(json.dumps(text | more))
    return tmp_path / "codes", tmp_path / "values"


def test_as_a_source_it_is_what_its_values_are(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    config = LLMTemplate.get("deepseek_v3").get_config(scheme="int4_wo_32")
    config.keep_prequantized_layers = False
    for source in checkpoints:
        quantize_checkpoint(source, tmp_path / f"{source.name}_out", config)
    outs = [tmp_path / f"{source.name}_out" for source in checkpoints]
    contents = [{path.name: path.read_bytes() for path in out.iterdir() if not path.name.startswith("quark_")} for out in outs]
    assert contents[0] == contents[1]


def test_as_a_quantized_model_it_has_its_values(checkpoints: tuple[Path, Path]) -> None:
    codes, values = checkpoints
    expected = load_file(values / "model.safetensors")
    model = import_model_from_safetensors(None, codes, device="cpu").state_dict()
    assert len([name for name in expected if ".experts.3." in name]) == 3
    for name, tensor in expected.items():
        if "layers.61." not in name:
            assert torch.equal(model[name], tensor), name


def test_gpus_have_kernels_for_it(checkpoints: tuple[Path, Path], request: pytest.FixtureRequest) -> None:
    if "ragged" not in request.node.name:
        cuda = next(one for one in inspect_checkpoint(checkpoints[0]).runtimes if one.runtime == "vllm_cuda")
        assert any(method.startswith("Fp8LinearMethod") for method in cuda.methods)
