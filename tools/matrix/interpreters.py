"""Interpreters of other versions of Python that are on PATH or that pyenv has installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["interpreter"]


def interpreter(version: str) -> Path | None:
    """Return the interpreter of a version such as ``"3.13"``, or None if no such interpreter is found."""
    return next((path for path in _candidates(version) if _is_of(path, version)), None)


def _candidates(version: str) -> Iterator[Path]:
    if (on_path := shutil.which(f"python{version}")) is not None:
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)


def _is_of(path: Path, version: str) -> bool:
    """Return whether an interpreter can be started and has the given version. A pyenv shim on PATH may fail
    to start."""
    said = subprocess.run(
        [path, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], capture_output=True, text=True, check=False
    ).stdout
    return said.strip() == version
