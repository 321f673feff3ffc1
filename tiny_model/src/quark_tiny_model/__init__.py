"""A Llama model with 1.7 million parameters, a tokenizer and a held-out text, for demonstrations and tests.

There are also two smaller trained models. One is a mixture-of-experts model (Qwen2-MoE). Its router chooses
two of eight experts for each token, and all tokens use one shared expert. The other model (OPT) has
LayerNorms, biases and learned position embeddings. All models are part of the package, so nothing is
downloaded.

Functions import torch and transformers only if they need them, so that paths and text are available quickly.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from quark.config.templates import LLMTemplate

__all__ = ["DIRECTORY", "KINDS", "calibration_batches", "held_out_text", "tiny_model", "tiny_model_dir", "tiny_template", "tiny_tokenizer"]

DIRECTORY = Path(__file__).with_name("llama")
"""The checkpoint, in Hugging Face form, with ``held_out.txt`` and ``PROVENANCE.md``."""
KINDS = ("llama", "mixture", "layernorm")
"""Directory names of the models; all use the tokenizer and the held-out text of the Llama."""


def tiny_model_dir(kind: str = "llama") -> Path:
    """Return the directory of a bfloat16 checkpoint in Hugging Face form. Do not write to this directory.

    ``kind`` is one of `KINDS`.
    """
    return DIRECTORY.with_name(kind)


def tiny_model(dtype: torch.dtype | None = None, blocks: int | None = None, kind: str = "llama") -> nn.Module:
    """Return a fresh copy of a model, in evaluation mode on the CPU.

    Args:
        dtype: Dtype of the parameters. If it is None, the dtype is float32.
        blocks: Number of decoder blocks. The model has only the first ``blocks`` blocks. If it is None, the
            model has all blocks.
        kind: One of `KINDS`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir(kind), dtype=dtype or torch.float32, local_files_only=True)
    if blocks is not None:
        facts: Any = tiny_template(kind).architecture
        del model.get_submodule(facts.decoder_blocks)[blocks:]
        model.config.num_hidden_layers = blocks
    whole: nn.Module = model.eval()
    return whole


def tiny_template(kind: str = "llama") -> LLMTemplate:
    """Return the registered template for the family of the model ``kind``, which is one of `KINDS`."""
    from quark.config.templates import LLMTemplate

    return LLMTemplate.get(json.loads((tiny_model_dir(kind) / "config.json").read_text(encoding="utf-8"))["model_type"])


def tiny_tokenizer() -> Any:
    """Return the tokenizer of the models.

    It is byte-level, has 1024 tokens, and adds no special tokens to a text.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DIRECTORY, local_files_only=True)


def held_out_text() -> str:
    """Return text from the sources of the training text that was not used for training."""
    return (DIRECTORY / "held_out.txt").read_text(encoding="utf-8")


def calibration_batches(n: int = 8, length: int = 128) -> list[Tensor]:
    """Return ``n`` sequences of tokens from the end of the held-out text. Each has the shape ``[1, length]``.

    Evaluation uses the beginning of the text.

    Raises:
        ConfigError: (a ValueError) The text has fewer than ``n * length`` tokens.
    """
    from quark.errors import ConfigError

    tokens = _held_out_tokens()
    if n < 1 or length < 1 or n * length > len(tokens):
        raise ConfigError(
            f"{n} sequences of {length} tokens exceed the {len(tokens)} tokens of the held-out text: give fewer or shorter sequences"
        )
    return [row[None].clone() for row in tokens[len(tokens) - n * length :].split(length)]


@cache
def _held_out_tokens() -> Tensor:
    import torch

    return torch.tensor(tiny_tokenizer()(held_out_text(), verbose=False)["input_ids"])
