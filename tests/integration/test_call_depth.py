"""The depth of a run: few calls, of few files, lie between the command and the rounding of a number."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from greenlet import getcurrent

from quark_schemes.formats.integer import IntegerFormat
from quark_tiny_model import tiny_model_dir

from .program import run

MOST_CALLS: dict[str | None, int] = {None: 25, "gptq": 25, "awq": 25}
"""From the command to the deepest rounding of a run, whichever that is: round-to-nearest rounds a weight while it
is encoded for its file, GPTQ also while it searches scales, and AWQ while it validates its scales on copies.
"""
MOST_FILES = 16


def own_calls(frame: FrameType | None) -> list[CodeType]:
    """Return the code of this project's frames, from the given one outwards; frames of comprehensions count, too.

    Behind the first frame of a greenlet comes that of its parent, which has started it.
    """
    calls, current = [], getcurrent()
    while frame is not None:
        if frame.f_globals["__name__"].startswith("quark"):
            calls.append(frame.f_code)
        frame = frame.f_back
        if frame is None and current.parent is not None:
            current = current.parent
            frame = current.gr_frame
    return calls


@pytest.mark.parametrize("algorithm", [None, "gptq", "awq"])
def test_a_number_is_rounded_few_calls_below_the_command(
    algorithm: str | None, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[list[CodeType]] = []
    round_ = IntegerFormat.round_

    def recorded(self: IntegerFormat, *args: Any) -> Any:
        stacks.append([round_.__code__, *own_calls(sys._getframe(1))])
        return round_(self, *args)

    monkeypatch.setattr(IntegerFormat, "round_", recorded)
    chosen = () if algorithm is None else ("--algorithm", algorithm)
    arguments = ("--scheme", "int4_wo_64", *chosen, "--calib", text, "--num-calib", 2, "--seq-len", 32, "--no-report")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *arguments, monkeypatch=monkeypatch) == 0
    deepest = max(stacks, key=len)
    names = [f"{Path(call.co_filename).name}: {call.co_name}" for call in reversed(deepest)]
    assert names[0] == "main.py: main", names
    assert len(names) <= MOST_CALLS[algorithm], names
    assert len({call.co_filename for call in deepest}) <= MOST_FILES, names
