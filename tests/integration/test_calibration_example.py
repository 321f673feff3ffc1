"""The example of calibration on data of one's own runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "calibration_data" / "calibrate.py"


def test_the_example_calibrates_on_each_kind_of_file(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["text.txt", "texts.jsonl", "chats.jsonl", "texts.parquet"]
    assert all(line.endswith("512 tokens in 8 sequences") for line in lines[:3])
