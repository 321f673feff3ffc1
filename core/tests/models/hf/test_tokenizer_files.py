"""A tokenizer is loaded from files of its checkpoint alone, whatever tokenizer_config.json names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quark.models.hf.tokenizer import load_tokenizer


def test_entries_that_name_files_elsewhere_are_replaced_by_files_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, elsewhere = tmp_path / "checkpoint", tmp_path / "elsewhere"
    for folder in (directory, elsewhere):
        folder.mkdir()
        for name in ("tokenizer.json", "emoji.json"):
            (folder / name).write_text("{}", encoding="utf-8")
    names = {"tokenizer_file": "vocab.json", "vocab_file": "vocab.json", "emoji_file": "emoji.json"}
    entries = {key: str(elsewhere / name) for key, name in names.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps(entries), encoding="utf-8")
    given: dict[str, Any] = {}
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **options: given.update(options) or str)
    load_tokenizer(directory)
    assert {key: given[key] for key in entries} == {
        "tokenizer_file": str(directory / "tokenizer.json"),
        "vocab_file": None,
        "emoji_file": str(directory / "emoji.json"),
    }
