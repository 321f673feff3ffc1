"""Variants of the bundled tiny model, with its weights: biases, a mixture of experts, quantized embeddings and head, rotations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen3MoeConfig

import quark
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_tiny_model import calibration_batches, tiny_model, tiny_tokenizer

__all__ = ["KINDS", "export_kind", "sizes"]


def sizes(model: Any, *more: str) -> dict[str, Any]:
    """Return the bundled model's sizes, by names that the configurations of all families have."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    others = ("max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(model.config, name) for name in (*names, *others, *more)}


def export_kind(kind: str, out: Path, tiny: nn.Module | None = None) -> None:
    """Write a checkpoint of one of `KINDS`, with the tokenizer."""
    family, make_model, make_config = KINDS[kind]
    model = make_model(tiny_model(torch.bfloat16))
    quantized = ModelQuantizer(make_config(LLMTemplate.get(family))).quantize_model(model, calibration_batches(2, 128))
    export_safetensors(quantized, out)
    tiny_tokenizer().save_pretrained(out)


def _with_biases(tiny: Any) -> nn.Module:
    model: Any = AutoModelForCausalLM.from_config(Qwen2Config(**sizes(tiny)), dtype=torch.bfloat16).eval()
    model.load_state_dict(tiny.state_dict(), strict=False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = _noise(parameter, name) * 0.3
    return model  # type: ignore[no-any-return]


def _mixture(tiny: Any) -> nn.Module:
    """A mixture of four experts, two for each token; an expert is the MLP with noise."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    width = tiny.config.intermediate_size
    config = Qwen3MoeConfig(**sizes(tiny, "head_dim"), **experts, moe_intermediate_size=width)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.load_state_dict(tiny.state_dict(), strict=False)
    for block, source in zip(model.model.layers, tiny.model.layers, strict=True):
        mlp, fused = source.mlp, block.mlp.experts
        both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        fused.gate_up_proj.data = both * (1 + 0.2 * _noise(fused.gate_up_proj, "up"))
        fused.down_proj.data = mlp.down_proj.weight * (1 + 0.2 * _noise(fused.down_proj, "down"))
        block.mlp.gate.weight.data = 0.1 * _noise(block.mlp.gate.weight, "gate")
    return model  # type: ignore[no-any-return]


def _with_norms_behind_layers(tiny: Any) -> nn.Module:
    """A Gemma 3 with tied embeddings. The norms are its own, the embedding is the bundled model's."""
    config = Gemma3TextConfig(**{**sizes(tiny, "head_dim"), "tie_word_embeddings": True})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.load_state_dict(tiny.state_dict(), strict=False)
    return model  # type: ignore[no-any-return]


def _noise(like: torch.Tensor, seed: str) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(sum(map(ord, seed)))).bfloat16()


def _itself(tiny: nn.Module) -> nn.Module:
    return tiny


def _scheme(name: str, **fields: Any) -> Callable[[LLMTemplate], QConfig]:
    return lambda template: template.get_config(scheme=name, **fields)


def _of_everything(template: LLMTemplate) -> QConfig:
    """Quantizes all layers, the tied embeddings too, which stay one tensor, and the head's inputs."""
    config = template.get_config(scheme="mx6")
    weights = attrs.evolve(config.global_quant_config, input_tensors=None)
    return attrs.evolve(config, exclude=[], layer_quant_config={"*embed_tokens": weights})


def _of_a_head(template: LLMTemplate) -> QConfig:
    """Quantizes only the tied embeddings, which stay one tensor."""
    int8 = quark.schemes().load_config("int8_wo_per_channel")()
    return QConfig(QLayerConfig(), layer_quant_config=dict.fromkeys(["lm_head", "*embed_tokens"], int8))


def _apart(template: LLMTemplate) -> QConfig:
    """Quantizes embedding and head by different schemes, so that each has its own weight."""
    config = _of_everything(template)
    return attrs.evolve(config, layer_quant_config={"*embed_tokens": quark.schemes().load_config("int4_wo_32")()})


def _mixed(template: LLMTemplate) -> QConfig:
    """Gives different schemes to layers, even to layers that vLLM fuses, and leaves a layer in float."""
    config, layers = template.get_config(scheme="int8"), {"up": "mx6", "gate": "int4_wo_64", "o": "bfp16", "q": "nvfp4"}
    config.layer_quant_config = {f"*{name}_proj": quark.schemes().load_config(scheme)() for name, scheme in layers.items()}
    config.exclude = ["lm_head", "*layers.0.self_attn.k_proj"]
    return config


def _partly_with_kernels(template: LLMTemplate) -> QConfig:
    """Quantizes by a scheme for which vLLM has a CPU kernel, and the MLPs by one without."""
    config = template.get_config(scheme="ptpc_fp8")
    config.layer_quant_config = {"*mlp*": quark.schemes().load_config("mx6")()}
    return config


def _rotated(template: LLMTemplate) -> QConfig:
    """Rotates the model with R3 and R4, which run in each forward."""
    config = template.get_config(scheme="int8", kv_cache_scheme="fp8", algorithm=["rotation", "smoothquant", "gptq"])
    (rotation,) = (settings for settings in config.algo_config or () if settings.name == "rotation")
    config.algo_config = [
        attrs.evolve(s, r3=True, r4=True, preset="reference") if s is rotation else s  # type: ignore[call-arg]
        for s in config.algo_config or ()
    ]
    return config


KINDS: dict[str, tuple[str, Callable[[Any], nn.Module], Callable[[LLMTemplate], QConfig]]] = {
    "embedding and head": ("llama", _itself, _of_everything),
    "embedding and head by two schemes": ("llama", _itself, _apart),
    "mixed precision": ("llama", _itself, _mixed),
    "kernels for some layers": ("llama", _itself, _partly_with_kernels),
    "rotations that run": ("llama", _itself, _rotated),
    "cache in fp8": ("llama", _itself, _scheme("mx6", kv_cache_scheme="fp8")),
    "biases": ("qwen2", _with_biases, _scheme("bfp16")),
    "mixture of experts": ("qwen3_moe", _mixture, _scheme("mx6")),
    "gemma 3": ("gemma3_text", _with_norms_behind_layers, _scheme("mx6")),
    "gemma 3, embedding and head": ("gemma3_text", _with_norms_behind_layers, _of_a_head),
}
"""Name → family, the function that makes the model from the bundled one, and the function that makes the configuration."""
