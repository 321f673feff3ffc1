"""Write a checkpoint of random bfloat16 weights, of any size.

    python -m benchmarks.random_checkpoints OUT [--shape smollm2] [--layers 30] [--shard-bytes 5000000000]

One block of random weights is repeated, and each tensor is a part of it that begins at another offset. Thus,
making an 8B model of 16 GB takes about as long as writing its files. Tensors have the names of published
checkpoints. Each expert has tensors of its own, even if transformers fuses the experts in memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from quark.checkpoint.shard_layout import ShardLayout
from quark.checkpoint.shard_writer import ShardWriter

__all__ = ["SHAPES", "random_config", "write_random_checkpoint"]

_LLAMA: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _LLAMA
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "tie_word_embeddings": False,
    },
    "tiny-mixture": {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 256,
    },
    "smollm2": _LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 58,
        "first_k_dense_replace": 0,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 129280,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
    },
}
"""Settings of the configurations: of two small models for tests, SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B,
Qwen3-30B-A3B, the mixture layers of DeepSeek-V3, and gpt-oss-120b in bfloat16.
"""
DRAWN = 1 << 24
"""Number of different weights in a checkpoint, 32 MiB."""
SHARD_BYTES = 5_000_000_000


def random_config(shape: str, layers: int | None = None) -> Any:
    """Return the transformers configuration of the shape ``shape`` with ``layers`` decoder layers."""
    settings = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    return AutoConfig.for_model(**settings, dtype="bfloat16")


def write_random_checkpoint(out: Path, shape: str = "smollm2", layers: int | None = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a checkpoint of a shape to the directory ``out``, and return the directory."""
    config = random_config(shape, layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    drawn = torch.empty(DRAWN, dtype=torch.bfloat16).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    out.mkdir(parents=True)
    config.save_pretrained(out)
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    stored = revert_weight_conversion(model, dict(model.state_dict()))
    tensors = [(name, meta) for name, meta in stored.items() if name not in tied]
    layout = ShardLayout.of([{name: meta} for name, meta in tensors], shard_bytes)
    with ShardWriter(layout, out) as writer:
        for i, (name, meta) in enumerate(tensors):
            writer.write({name: _tensor(name, meta, drawn, 7919 * i)})
        writer.finish()
    return out


def _tensor(name: str, meta: Tensor, drawn: Tensor, start: int) -> Tensor:
    if meta.ndim == 1 and "norm" in name:
        return torch.ones(meta.shape, dtype=meta.dtype)
    first = start % len(drawn)
    repeated = drawn.roll(-first).repeat(-(-meta.numel() // len(drawn)))
    return repeated[: meta.numel()].view(meta.shape).to(meta.dtype)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    args = parser.parse_args(arguments)
    write_random_checkpoint(args.out, args.shape, args.layers, args.shard_bytes)


if __name__ == "__main__":
    main()
