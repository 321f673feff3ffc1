"""The bundled tiny Llama: real weights, tokenizer and held-out text without a network. See ``tiny_llama/PROVENANCE.md``.

transformers is imported inside the functions: paths and text do without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark.errors import ConfigError


def tiny_model_dir() -> Path:
    """Directory of the checkpoint, in Hugging Face form, bfloat16; read it, write elsewhere."""
    return Path(__file__).with_name("tiny_llama")


def tiny_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A fresh copy of the model, in evaluation mode on the CPU."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(tiny_model_dir(), dtype=dtype, local_files_only=True)
    return model.eval()


def tiny_tokenizer() -> Any:
    """Its tokenizer: 1024 tokens, byte-level, adds nothing on its own."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir(), local_files_only=True)


def held_out_text() -> str:
    """Text of the same kind as the model was trained on, which it has not seen."""
    return (tiny_model_dir() / "held_out.txt").read_text(encoding="utf-8")


def calibration_batches(n: int = 8, length: int = 128) -> list[Tensor]:
    """``n`` sequences of tokens, each ``[1, length]``, from the end of the held-out text, so that its beginning is left for evaluation.

    Raises:
        ConfigError: The text does not have so many tokens.
    """
    tokens = torch.tensor(tiny_tokenizer()(held_out_text(), verbose=False)["input_ids"])
    if n < 1 or length < 1 or n * length > len(tokens):
        raise ConfigError(f"{n} sequences of {length} tokens cannot be had: the held-out text has {len(tokens)} tokens")
    return [row[None] for row in tokens[len(tokens) - n * length :].split(length)]
