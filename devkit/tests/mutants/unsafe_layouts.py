"""Layouts that give something away, run code of a checkpoint, or leave something behind when they read."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from quark.checkpoint import CheckpointContent, ExportOptions, StoredConfig

from .healthy_layouts import Plain, Reader, changed_json

__all__ = ["NamesItsSource", "NamesTheDay", "NamesTheMachine", "Pickles", "TakesNotes", "Unpickles", "WithAnIdleOption"]


class NamesItsSource(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        changed_json(out / "config.json", lambda data: data.update(made_from=str(content.model.config.name_or_path)))


class NamesTheMachine(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        changed_json(out / "config.json", lambda data: data.update(made_on=platform.node()))


class NamesTheDay(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        changed_json(out / "config.json", lambda data: data.update(made_at=datetime.now().isoformat()))


class Pickles(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        (out / "extra.bin").write_bytes(pickle.dumps({"a": [1, 2]}))


class TakesNotes(Reader):
    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        (directory / "notes").write_text("it was read", encoding="utf-8")
        return super().configuration(block, directory)


class Unpickles(Reader):
    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        pickle.loads(pickle.dumps(Path()))
        return super().configuration(block, directory)


class WithAnIdleOption(Plain):
    def __init__(self, level: int = 3) -> None:
        self.level = level
