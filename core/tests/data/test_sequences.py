"""Calibration tokens made of a text."""

from __future__ import annotations

from pathlib import Path

import torch

from quark.hf.calibration_text import calibration_tokens
from quark.testing.tiny import held_out_text, tiny_tokenizer


def test_calibration_sequences_are_the_beginning_of_the_text_one_after_another(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(held_out_text()[:2000], encoding="utf-8")
    tokens = tiny_tokenizer()(text.read_text(encoding="utf-8"))["input_ids"]
    found = calibration_tokens(tiny_tokenizer(), text, count=5, length=7)
    assert [batch.shape for batch in found] == [(1, 7)] * 5
    assert torch.cat(found, dim=1).tolist() == [tokens[:35]]
