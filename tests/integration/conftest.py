"""Fixtures: a file with calibration text for tests of the command line; a checkpoint and records for tests of resumed runs."""

from pathlib import Path
from typing import Any

import pytest

from quark.calibration.report import CalibrationReport
from quark.runs import quantize_block
from quark_tiny_model import held_out_text

from .interrupted import checkpoint
from .killed_runs import figures_of


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calib.txt"
    path.write_text(held_out_text()[:20_000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the blocks that have been quantized, in order."""
    names: list[str] = []
    plain = quantize_block.quantize_block

    def recording(started: Any, sink: Any, block: Any, *rest: Any) -> None:
        names.append(block.name)
        plain(started, sink, block, *rest)

    monkeypatch.setattr(quantize_block, "quantize_block", recording)
    return names


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calibration reports of all runs."""
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(CalibrationReport, "log", lambda report: logged.append(figures_of(report)))
    return logged
