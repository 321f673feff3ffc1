"""Companions of a checkpoint: tokenizer, settings of generation and other files beside its weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from quark.checkpoint.destination import COMPANIONS
from quark.checkpoint.exporter import Tokenizer
from quark.errors import OutputError
from quark.models.hf.custom_code import code_of
from quark.models.hf.internals import source_of

__all__ = ["copy_companions", "save_companions"]


def save_companions(model: nn.Module, directory: Path, tokenizer: Tokenizer | None = None) -> None:
    """Write the companions of a model: its tokenizer and settings of generation.

    Files beside its float checkpoint are copied.

    Code that the configs of that checkpoint name is copied too, with the modules that it imports
    (`quark.models.hf.custom_code.code_of`).

    Args:
        model: The model; of one outside transformers only the tokenizer is written.
        directory: Where to; files that are there stay.
        tokenizer: In place of the one beside the float checkpoint.

    Raises:
        OutputError: The tokenizer cannot be saved.
    """
    if tokenizer is not None:
        try:
            tokenizer.save_pretrained(directory)
        except OSError:
            raise
        except Exception as error:  # whatever the caller's object does
            reason = f"({type(error).__name__}: {error})"
            raise OutputError(f"the tokenizer, a {type(tokenizer).__name__}, cannot be saved {reason}: give another, or none") from error
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_file"):
        return
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    source = Path(source_of(config))
    if source.name:
        copy_companions(source, directory)


def copy_companions(source: Path, directory: Path) -> None:
    """Copy the companions of a checkpoint: tokenizer, processor, settings, and the code that configs name.

    Args:
        source: Directory of the checkpoint.
        directory: Where to; files that are there stay.
    """
    for name in (*COMPANIONS, *code_of(source)):
        if (source / name).is_file() and not (directory / name).exists():
            shutil.copyfile(source / name, directory / name)
