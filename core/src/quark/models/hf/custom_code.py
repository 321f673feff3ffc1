"""Code that comes with a checkpoint: it runs if the user allows it, and is otherwise refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quark.errors import CheckpointError, UnsupportedError
from quark.models.hf.json_files import bounded_bytes, read_json

_NAMING = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of a checkpoint whose ``auto_map`` names code."""
_LARGEST = 1 << 24  # bytes: no hand-written module has more
_RELATIVE = re.compile(r"^\s*from\s+\.(?:(\w+)|\s+import\s+\(?([\w ,]+))", re.MULTILINE)
"""``from .name import …`` and ``from . import name``: imports between modules in one folder."""


def code_files(file: Path) -> list[str]:
    """Return the names of Python files in ``auto_map`` of a config.json or tokenizer_config.json.

    Empty without that key.
    """
    data = read_json(file) if file.is_file() else None
    auto_map = data.get("auto_map") if isinstance(data, dict) else None
    if not isinstance(auto_map, Mapping):
        return []
    references: list[Any] = [one for value in auto_map.values() for one in (value if isinstance(value, list) else [value])]
    return sorted({f"{one.rpartition('--')[2].partition('.')[0]}.py" for one in references if isinstance(one, str)})


def code_of(directory: Path) -> list[str]:
    """Return the names of the Python files that belong to a checkpoint.

    These are the files that ``auto_map`` and modules.json name, and the files that they import. Other Python
    files in the directory do not belong to the checkpoint. No code runs.
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
    """Return folder and class of each part of a sentence-transformers model, from its modules.json.

    The folder of the model itself is ``""``. The result is empty if modules.json is missing or damaged: quark
    only copies that file.
    """
    try:
        parts = json.loads(bounded_bytes(directory / "modules.json")) if (directory / "modules.json").is_file() else []
    except (CheckpointError, ValueError, RecursionError):
        return []
    named = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [(str(part.get("path", "")).strip("/"), str(part.get("type", ""))) for part in named]


def refuse_code(file: Path) -> None:
    """Raise if a file has an ``auto_map``.

    Call this if the code is needed, but the user has not allowed it.

    Raises:
        UnsupportedError: There is an ``auto_map``; the message names its files and how to allow them.
    """
    if files := code_files(file):
        raise UnsupportedError(
            f"'{file}' needs code from the checkpoint ({', '.join(files)}), which quark runs only if you allow it. Read the code, then "
            "give --trust-remote-code (trust_remote_code=True)"
        )
