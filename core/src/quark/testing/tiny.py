"""The tiny Llama of the distribution ``quark-tiny-model``: real weights, a tokenizer and held-out text without a network.

transformers is imported inside the functions: paths and text do without it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark.errors import ConfigError, MissingPluginError
from quark.templates import LLMTemplate

__all__ = ["calibration_batches", "held_out_text", "tiny_model", "tiny_model_dir", "tiny_template", "tiny_tokenizer"]

_PACKAGE = "quark_tiny_model"


def tiny_model_dir() -> Path:
    """Return the directory of the checkpoint, in Hugging Face form, bfloat16; read it, write elsewhere.

    Raises:
        MissingPluginError: The distribution that holds the model is not installed.
    """
    try:
        directory: Path = import_module(_PACKAGE).DIRECTORY
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:
            raise
        raise MissingPluginError(
            "the tiny model is a distribution of its own, which is not installed: pip install quark-tiny-model"
        ) from None
    return directory


def tiny_model(dtype: torch.dtype = torch.float32, blocks: int | None = None) -> nn.Module:
    """Return a fresh copy of the model, in evaluation mode on the CPU.

    Args:
        dtype: Of its parameters.
        blocks: How many of its decoder blocks it keeps, from the first; None for all three.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir(), dtype=dtype, local_files_only=True)
    if blocks is not None:
        del model.model.layers[blocks:]
        model.config.num_hidden_layers = blocks
    whole: nn.Module = model.eval()
    return whole


def tiny_template() -> LLMTemplate:
    """The registered template of the model's family."""
    return LLMTemplate.get(json.loads((tiny_model_dir() / "config.json").read_text(encoding="utf-8"))["model_type"])


def tiny_tokenizer() -> Any:
    """Return the model's tokenizer: byte-level, 1024 tokens, no special tokens added to a text."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir(), local_files_only=True)


def held_out_text() -> str:
    """Return text from the same sources as the training text, and not part of it."""
    return (tiny_model_dir() / "held_out.txt").read_text(encoding="utf-8")


def calibration_batches(n: int = 8, length: int = 128) -> list[Tensor]:
    """Return ``n`` sequences of tokens, each ``[1, length]``, from the end of the held-out text; evaluation uses its beginning.

    Raises:
        ConfigError: The text does not have so many tokens.
    """
    tokens = _held_out_tokens()
    if n < 1 or length < 1 or n * length > len(tokens):
        raise ConfigError(f"{n} sequences of {length} tokens are more than the {len(tokens)} tokens of the held-out text")
    return [row[None].clone() for row in tokens[len(tokens) - n * length :].split(length)]


@cache
def _held_out_tokens() -> Tensor:
    return torch.tensor(tiny_tokenizer()(held_out_text(), verbose=False)["input_ids"])
