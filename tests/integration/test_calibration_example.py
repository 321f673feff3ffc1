"""The example of calibration on data of one's own runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "calibration_data" / "calibrate.py"


def test_the_example_calibrates_on_each_kind_of_file() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["text.txt", "texts.jsonl", "chats.jsonl", "texts.parquet"]
    assert all(line.endswith("512 tokens in 8 sequences") for line in lines[:3])
