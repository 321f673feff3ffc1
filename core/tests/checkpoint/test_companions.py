"""Companions of a checkpoint: files of the float checkpoint, or the caller's tokenizer.

They are never written over other files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from quark.checkpoint import save_companions
from quark.errors import OutputError
from quark_tiny_model import tiny_model, tiny_model_dir


class Tokenizer:
    def save_pretrained(self, directory: object) -> None:
        Path(str(directory), "tokenizer.json").write_text("mine")


class Broken:
    def save_pretrained(self, directory: object) -> None:
        raise RuntimeError("no vocabulary")


def test_files_beside_the_float_checkpoint_are_copied(tmp_path: Path) -> None:
    save_companions(tiny_model(), tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tiny_model_dir() / "tokenizer.json").read_bytes()
    assert not list(tmp_path.glob("*.safetensors")) + list(tmp_path.glob("held_out.txt"))


def test_a_tokenizer_that_is_given_takes_their_place(tmp_path: Path) -> None:
    save_companions(tiny_model(), tmp_path, Tokenizer())
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


def test_a_model_outside_transformers_has_the_tokenizer_alone(tmp_path: Path) -> None:
    save_companions(nn.Linear(2, 2), tmp_path, Tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_a_tokenizer_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"a Broken, cannot be saved \(RuntimeError: no vocabulary\): give another, or none"):
        save_companions(nn.Linear(2, 2), tmp_path, Broken())
