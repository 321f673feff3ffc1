"""Text files, and calibration tokens made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from quark.errors import CalibrationError

__all__ = ["calibration_tokens", "read_text"]


def read_text(path: Path) -> str:
    """Return the text of a file, or of all .txt files of a directory in order of name.

    Raises:
        CalibrationError: There is no such file, or no text in it.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not all(f.is_file() for f in files):
        raise CalibrationError(f"'{path}' is neither a text file nor a directory with .txt files")
    text = "\n\n".join(f.read_text(encoding="utf-8", errors="replace") for f in files)
    if not text.strip():
        raise CalibrationError(f"'{path}' holds no text")
    return text


def calibration_tokens(tokenizer: Any, path: Path, count: int, length: int) -> list[Tensor]:
    """Return up to ``count`` sequences of ``length`` tokens, each ``[1, length]``, from the start of the text; the last may be shorter.

    Raises:
        CalibrationError: The checkpoint has no tokenizer, or the text gives no token.
    """
    if tokenizer is None:
        raise CalibrationError(
            "the checkpoint has no tokenizer, so text cannot be turned into tokens: use the Python interface with token tensors"
        )
    # Eight characters a token is generous for any tokenizer, so no more text than needed is tokenized.
    text = read_text(path)[: count * length * 8]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0][: count * length]
    if ids.numel() == 0:
        raise CalibrationError(f"'{path}' gives no tokens")
    return [row[None] for row in ids.split(length)]
