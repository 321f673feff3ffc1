"""Code that comes with a checkpoint: run where the user says so, and else refused, in one sentence that names the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quark.errors import UnsupportedError
from quark.hf.json_files import read_json

__all__ = ["code_files", "refuse_code"]


def code_files(file: Path) -> list[str]:
    """Return the names of the Python files that ``auto_map`` of a config.json or tokenizer_config.json names; none without that key."""
    data = read_json(file) if file.is_file() else None
    auto_map = data.get("auto_map") if isinstance(data, dict) else None
    if not isinstance(auto_map, Mapping):
        return []
    references: list[Any] = [one for value in auto_map.values() for one in (value if isinstance(value, list) else [value])]
    return sorted({f"{one.rpartition('--')[2].partition('.')[0]}.py" for one in references if isinstance(one, str)})


def refuse_code(file: Path) -> None:
    """Raise if a file has an ``auto_map``; for a caller whose user has not said that the code may run, and who cannot do without it.

    Raises:
        UnsupportedError: There is an ``auto_map``; the message names its files and how to allow them.
    """
    if files := code_files(file):
        raise UnsupportedError(
            f"'{file}' needs code of the checkpoint's own ({', '.join(files)}), which is not run unless you say so: read it, then give "
            "--trust-remote-code (trust_remote_code=True)"
        )
