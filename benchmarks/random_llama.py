"""Write a Llama of random bfloat16 weights, of any size: ``python -m benchmarks.random_llama OUT``.

    python -m benchmarks.random_llama OUT [--shape smollm2|1b|8b] [--layers 30] [--shard-bytes 5000000000]

One block of random weights is repeated, and each tensor starts at another place in it. So an 8B model, 16 GB,
takes about as long as writing its files.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quark.checkpoint.shard_layout import ShardLayout
from quark.checkpoint.shard_writer import ShardWriter

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
"""The shapes of SmolLM2-135M, Llama-3.2-1B and Llama-3.1-8B."""
DRAWN = 1 << 24
"""Number of different weights in a checkpoint, 32 MiB."""
SHARD_BYTES = 5_000_000_000


def write_random_llama(out: Path, shape: str = "smollm2", layers: int | None = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write the checkpoint, and return its directory."""
    sizes = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = AutoConfig.for_model("llama", **sizes, max_position_embeddings=8192, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    drawn = torch.empty(DRAWN, dtype=torch.bfloat16).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    out.mkdir(parents=True)
    config.save_pretrained(out)
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    tensors = [(name, meta) for name, meta in model.state_dict().items() if name not in tied]
    layout = ShardLayout.of([{name: meta} for name, meta in tensors], shard_bytes)
    with ShardWriter(layout, out) as writer:
        for i, (name, meta) in enumerate(tensors):
            writer.write({name: _tensor(meta, drawn, 7919 * i)})
        writer.finish()
    return out


def _tensor(meta: Tensor, drawn: Tensor, start: int) -> Tensor:
    if meta.ndim == 1:  # weight of a norm
        return torch.ones(meta.shape, dtype=meta.dtype)
    first = start % len(drawn)
    repeated = drawn.roll(-first).repeat(-(-meta.numel() // len(drawn)))
    return repeated[: meta.numel()].view(meta.shape)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    args = parser.parse_args(arguments)
    write_random_llama(args.out, args.shape, args.layers, args.shard_bytes)


if __name__ == "__main__":
    main()
