"""A user of Windows or macOS quantizes, resumes, replaces and reloads, and gets the bytes that Linux writes.

The systems are simulated; CONTRIBUTING.md says how to run every test so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .on_another_system import whole

pytestmark = pytest.mark.thorough

KIT = Path(__file__).parents[1] / "kit" / "other_system"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("here")
    whole(folder)
    return contents(folder)


@pytest.mark.parametrize(("system", "platform"), [("windows", "win32"), ("macos", "darwin")])
def test_files_are_those_of_this_system_and_nothing_else_is_left(
    system: str, platform: str, here: dict[str, bytes], tmp_path: Path
) -> None:
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != KIT]
    environment = {**os.environ, "QUARK_OTHER_SYSTEM": system, "PYTHONPATH": os.pathsep.join([str(KIT), *others])}
    command = [sys.executable, str(Path(__file__).with_name("on_another_system.py")), platform, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    there = contents(tmp_path)
    assert there.pop(os.path.join("held", "a")) == b"one\ntwo\n"
    assert there.keys() == here.keys()
    assert [name for name in here if there[name] != here[name]] == []
