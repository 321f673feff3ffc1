"""Checkpoints with layers that come quantized: DeepSeek-V3, Kimi K2 and gpt-oss; and their codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM

from quark.config.model import QConfig
from quark.torch import LLMTemplate

DTYPE = torch.bfloat16
Coder = Callable[[str, Tensor], dict[str, Tensor]]


def deepseek(rope: int = 64) -> Any:
    """A model of the family of DeepSeek-V3 and Kimi K2.

    The published models have 64 channels that turn beside those of compressed keys and values: with these,
    `kv_a_proj_with_mqa` ends in half a block.
    """
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
        kv_lora_rank=128,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=64,
    )
    return DeepseekV3ForCausalLM(config).to(DTYPE)


def gpt_oss() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    return GptOssForCausalLM(GptOssConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)).to(DTYPE)


def fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """FP8 codes in blocks of 128 x 128, of every matrix but embeddings and routers."""
    if tensor.ndim != 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", ".gate.weight")):
        return {name: tensor}
    codes, scale = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty([-(-n // 128) for n in tensor.shape])
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = tensor[at].float().abs().max() / 448
            codes[at] = (tensor[at].float() / scale[i, j]).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[0, 0] = 0x80  # minus zero: its value is that of another code
    return {name: codes, f"{name}_scale_inv": scale}


def int4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Symmetric codes of 4 bits in groups of 32 columns with scales in bfloat16, of routed experts alone."""
    if ".experts." not in name:
        return {name: tensor}
    rows, columns = tensor.shape
    groups = tensor.float().view(rows, -1, 32)
    scale = (groups.abs().amax(-1) / 7).to(DTYPE)
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).view(rows, columns // 8, 8).to(torch.int64) + 8
    words = (codes << (4 * torch.arange(8))).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": torch.tensor([rows, columns])}


def mxfp4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    experts, inputs, outputs = tensor.shape
    generator = torch.Generator().manual_seed(len(name))
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.randint(118, 124, blocks.shape[:-1], generator=generator).byte()}


KIMI = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False},
        }
    },
}
DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


@attrs.frozen
class Form:
    """A form of quantized checkpoints.

    Attributes:
        model: Makes the float model.
        code: What a tensor of it is stored as.
        block: The ``quantization_config``.
        template: Name of the template.
        excluded: Patterns of layers that come quantized and stay so.
        scheme: Scheme of the others.
        kept: How many layers stay as they are.
    """

    model: Callable[[], Any]
    code: Coder
    block: dict[str, Any]
    template: str
    excluded: tuple[str, ...]
    scheme: str
    kept: int

    def config(self, **options: Any) -> QConfig:
        config = LLMTemplate.get(self.template).get_config(self.scheme, exclude_layers=[*self.excluded, "lm_head", "*.gate", "*.router"])
        return attrs.evolve(config, **options)


FORMS = {
    "DeepSeek": Form(deepseek, fp8, DEEPSEEK, "deepseek_v3", ("*self_attn*",), "int4_wo_32", 10),
    "Kimi": Form(deepseek, int4, KIMI, "deepseek_v3", ("*.experts.*",), "fp8", 12),
    "gpt-oss": Form(gpt_oss, mxfp4, {"quant_method": "mxfp4"}, "gpt_oss", ("*.experts.*",), "ptpc_fp8", 16),
}


def made(form: Form, tmp_path: Path) -> Path:
    """The quantized checkpoint."""
    form.model().save_pretrained(tmp_path / "float")
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "float/model.safetensors").items():
        tensors |= form.code(name, tensor)
    (tmp_path / "source").mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "source/model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "float/config.json").read_text())
    (tmp_path / "source/config.json").write_text(json.dumps(config | {"quantization_config": form.block}))
    return tmp_path / "source"


def tiny_config(scheme: str) -> QConfig:
    return LLMTemplate.get("llama").get_config(scheme)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith("quark_")}


def nibbles(tensor: Tensor) -> Tensor:
    """Codes of 4 bits, the lowest first, in order."""
    return torch.stack([tensor.view(torch.uint8) & 15, tensor.view(torch.uint8) >> 4], -1).flatten(-2)


def stored_codes(stored: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return codes and scales of each layer of a source, as bytes; of integers, codes from −8."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, tensor in stored.items():
        if name.endswith("weight_scale_inv"):
            found[name.removesuffix(".weight_scale_inv")] = stored[name.removesuffix("_scale_inv")].view(torch.uint8), tensor
        elif name.endswith("weight_packed"):
            layer = name.removesuffix(".weight_packed")
            found[layer] = nibbles(tensor).to(torch.int8) - 8, stored[f"{layer}.weight_scale"].float()
        elif name.endswith("_blocks"):
            owner, _, leaf = name.removesuffix("_blocks").rpartition(".")
            for expert, blocks in enumerate(tensor):
                scales = stored[name.replace("_blocks", "_scales")][expert]
                found[f"{owner}.{expert}.{leaf}"] = blocks.flatten(-2), scales
    return found


def written_codes(out: dict[str, Tensor], layer: str) -> tuple[Tensor, Tensor]:
    """The same of a layer that was written, in the Quark layout or in that of compressed-tensors."""
    scale = out.get(f"{layer}.weight_scale", out.get(f"{layer}.weight_scale_inv"))
    assert scale is not None
    packed = out.get(f"{layer}.weight_packed")
    if packed is not None and packed.dtype is torch.int32:
        return nibbles(packed).to(torch.int8) - 8, scale
    codes = out[f"{layer}.weight"] if packed is None else packed
    if codes.dtype is torch.int32:  # eight in a word, in the order of AWQ's kernels
        signed = nibbles(codes).view(codes.shape[0], -1, 8)[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1).to(torch.int8)
        return torch.where(signed > 7, signed - 16, signed).t().contiguous(), scale.t().contiguous()
    return codes.view(torch.uint8), scale


def assert_kept(form: Form, source: Path, out: Path) -> None:
    stored, result = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    expected = {layer: pair for layer, pair in stored_codes(stored).items() if any(p.strip("*") in layer for p in form.excluded)}
    assert len(expected) == form.kept
    for layer, (codes, scale) in expected.items():
        own, own_scale = written_codes(result, layer)
        assert torch.equal(own, codes), layer
        assert own_scale.dtype == scale.dtype, layer
        assert torch.equal(own_scale, scale), layer
