"""Makes inputs for speech models: a synthetic voice speaks texts."""

from __future__ import annotations

import re
import shutil
import subprocess

import torch
from torch import Tensor

RATE = 16_000
"""Samples in a second."""


def spoken(text: str, language: str) -> Tensor:
    """Return the sound of a text that espeak-ng speaks, as float32 ``[samples]`` between −1 and 1.

    The sample rate is `RATE`.

    Args:
        text: Words to speak.
        language: Code of the voice, such as ``en``.

    Raises:
        ValueError: A program is missing, or the speech is longer than a model's window of 30 s.
    """
    if missing := [program for program in ("espeak-ng", "sox") if shutil.which(program) is None]:
        raise ValueError(f"speech needs {' and '.join(missing)}: install with `apt-get install espeak-ng sox`")
    wave = subprocess.run(["espeak-ng", "-v", language, "--stdin", "--stdout"], input=text.encode(), capture_output=True, check=True).stdout
    form = ["-r", str(RATE), "-c", "1", "-b", "16", "-e", "signed", "-t", "raw", "-"]
    samples = subprocess.run(["sox", "-D", "-V1", "-t", "wav", "-", *form], input=wave, capture_output=True, check=True).stdout
    if len(samples) > 30 * RATE * 2:
        raise ValueError(f"'{text[:40]}…' takes longer to speak than a model's window of 30 s: give a shorter --length")
    return torch.frombuffer(bytearray(samples), dtype=torch.int16) / 32_768


def words_of(text: str) -> str:
    """Return the words of a text in one line, without characters that are not spoken.

    >>> words_of("quick  {brown} fox,\\nhe said.")
    'quick brown fox, he said.'
    """
    return " ".join(re.sub(r"[^\w\s',.?!-]|_", " ", text).split()).strip()
