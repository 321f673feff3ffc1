"""The program in a directory with a model that sees or hears, and with data for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.media_models import SEEING, media_checkpoint, read_no_videos, write_images, write_sounds

from .program import run

LLAVA, WHISPER = "LlavaForConditionalGeneration", "WhisperForConditionalGeneration"


class Program:
    """The program in a directory with a checkpoint and data of one class."""

    def __init__(self, name: str, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.name, self.folder, self.patch, self.capsys = name, folder, patch, capsys
        if name in SEEING:
            pytest.importorskip("PIL")
            read_no_videos(patch)
        self.model = media_checkpoint(name, folder / "model")
        self.data = (write_images if name in SEEING else write_sounds)(folder / "data")

    def quark(self, *arguments: object, code: int = 0) -> str:
        """Run the program; return what it says."""
        self.capsys.readouterr()
        assert run(*arguments, monkeypatch=self.patch) == code
        said = self.capsys.readouterr()
        return " ".join((said.err if code else said.out).split())

    def quantize(self, out: str, *options: object, code: int = 0) -> Path:
        """Quantize the model on its data."""
        self.quark("quantize", self.model, self.folder / out, "--calib", self.data, "--no-report", *options, code=code)
        return self.folder / out

    def result(self, *arguments: object) -> dict[str, Any]:
        """Run the program; return its result."""
        self.capsys.readouterr()
        assert run(*arguments, "--json", monkeypatch=self.patch) == 0
        result: dict[str, Any] = json.loads(self.capsys.readouterr().out.splitlines()[-1])
        return result

    def evaluate(self, *arguments: object) -> dict[str, Any]:
        """Return what the program measures on the data."""
        return self.result("evaluate", *arguments, "--text", self.data)

    def report(self, out: Path) -> dict[str, Any]:
        """Return the report of an export, whose page names every metric."""
        report: dict[str, Any] = json.loads((out / "quark_report.json").read_text())
        page = (out / "quark_report.html").read_text()
        assert all(f">{figure['name']}</th>" in page for figure in report["evaluation"]["figures"])
        return report
