"""Calibration text in a file, for the tests of the command line."""

from pathlib import Path

import pytest

from quark.testing.tiny import held_out_text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calib.txt"
    path.write_text(held_out_text()[:20_000], encoding="utf-8")
    return path
