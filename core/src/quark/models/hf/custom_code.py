"""Functions for code that comes with a checkpoint. Such code runs only if the user allows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quark.errors import CheckpointError, UnsupportedError
from quark.models.hf.json_files import bounded_bytes, read_json

_NAMING = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Names of those files of a checkpoint whose ``auto_map`` may name code."""
_LARGEST = 1 << 24  # maximum number of bytes of a Python file; no hand-written module has more
_RELATIVE = re.compile(r"^\s*from\s+\.(?:(\w+)|\s+import\s+\(?([\w ,]+))", re.MULTILINE)
"""Imports of modules in the same folder, such as ``from .name import …`` and ``from . import name``."""


def code_files(file: Path) -> list[str]:
    """Return the names of the Python files that ``auto_map`` in the JSON file ``file`` names.

    The result is empty if the file does not exist or has no ``auto_map``.
    """
    data = read_json(file) if file.is_file() else None
    auto_map = data.get("auto_map") if isinstance(data, dict) else None
    if not isinstance(auto_map, Mapping):
        return []
    references: list[Any] = [one for value in auto_map.values() for one in (value if isinstance(value, list) else [value])]
    return sorted({f"{one.rpartition('--')[2].partition('.')[0]}.py" for one in references if isinstance(one, str)})


def code_of(directory: Path) -> list[str]:
    """Return the names of the Python files that belong to a checkpoint.

    These are the files that ``auto_map`` and ``modules.json`` name, and the files that these files import.
    Other Python files in the directory do not belong to the checkpoint. The function runs no code of the
    checkpoint.
    """
    found: set[str] = set()
    waiting = [name for file in _NAMING for name in code_files(directory / file)]
    waiting += [f"{kind.partition('.')[0]}.py" for _, kind in sentence_modules(directory)]
    while waiting:
        name = waiting.pop()
        path = directory / name
        if name in found or path.name != name or not path.is_file() or path.stat().st_size > _LARGEST:
            continue
        found.add(name)
        for module, several in _RELATIVE.findall(path.read_text(encoding="utf-8", errors="replace")):
            waiting += [f"{one.strip()}.py" for one in (module or several).split(",")]
    return sorted(found)


def sentence_modules(directory: Path) -> list[tuple[str, str]]:
    """Read ``modules.json`` of a sentence-transformers model, and return the folder and the class of each
    part.

    The folder of the model itself is ``""``. If ``modules.json`` is missing or damaged, the result is empty.
    A damaged file is not an error, because quark itself only copies ``modules.json``.
    """
    try:
        parts = json.loads(bounded_bytes(directory / "modules.json")) if (directory / "modules.json").is_file() else []
    except (CheckpointError, ValueError, RecursionError):
        return []
    named = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [(str(part.get("path", "")).strip("/"), str(part.get("type", ""))) for part in named]


def refuse_code(file: Path) -> None:
    """Raise an error if the JSON file ``file`` has an ``auto_map``.

    Call this if a checkpoint needs its own code, but the user has not allowed this code to run.

    Raises:
        UnsupportedError: ``file`` has an ``auto_map``. The message names the Python files, and says how to
            allow quark to run them.
    """
    if files := code_files(file):
        raise UnsupportedError(
            f"'{file}' needs code from the checkpoint ({', '.join(files)}), which quark runs only if you allow it. Read the code, then "
            "give --trust-remote-code (trust_remote_code=True)"
        )
