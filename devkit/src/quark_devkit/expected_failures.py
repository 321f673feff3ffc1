"""Expected failures: checks that an author declares as failing, with reasons, in ``pyproject.toml``.

::

    [tool.quark.conformance.expected-failures]
    "format:acme_int3:saturates" = "values beyond the range wrap around on purpose"

An expected failure must fail: if the check passes, remove the entry. An entry that names no check of the
distribution is an error.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from quark.base.names import closest
from quark.errors import ConfigError
from quark.plugins.discovery import normalized

__all__ = ["expected_failures", "find_pyproject", "refuse_unknown"]

_TABLE = "tool.quark.conformance.expected-failures"


def find_pyproject(distribution: str, start: Path | None = None) -> Path | None:
    """Return the ``pyproject.toml`` of a distribution.

    The file is looked for in ``start``, then in the directories above, then through an editable installation.

    Args:
        distribution: Name of the distribution, in any spelling.
        start: Directory to begin with; the working directory by default.

    Returns:
        The path; None if no ``pyproject.toml`` of this distribution is found.
    """
    start = (start or Path.cwd()).resolve()
    for directory in (start, *start.parents):
        if _is_of(directory / "pyproject.toml", distribution):
            return directory / "pyproject.toml"
    installed = _installed_from(distribution)
    return installed if installed is not None and _is_of(installed, distribution) else None


def expected_failures(pyproject: Path | None) -> dict[str, str]:
    """Return the reasons of expected failures by ``"kind:name:check"``. Without a file, the dictionary is
    empty.

    Raises:
        ConfigError: The file is not TOML, or its table does not map ids to reasons.
    """
    if pyproject is None:
        return {}
    table = _read(pyproject)
    for key in _TABLE.split("."):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise ConfigError(f'[{_TABLE}] of {pyproject} is not a table: write \'"format:acme_int3:saturates" = "the reason"\' below it')
    for key, reason in table.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"'{key}' in [{_TABLE}] of {pyproject} has no reason: write why the check fails")
    return dict(table)


def refuse_unknown(expected: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise ConfigError if an expected failure names an unknown check.

    Args:
        expected: The expected failures, in the form that `expected_failures` returns.
        known: The ids of all checks of all subjects of the distribution.
    """
    ids = set(known)
    for key in expected:
        if key not in ids:
            near = closest(key, ids)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"the expected failure '{key}' names no check of this distribution{hint}: correct or remove it")


def _is_of(pyproject: Path, distribution: str) -> bool:
    if not pyproject.is_file():
        return False
    project = _read(pyproject).get("project", {})
    name = project.get("name") if isinstance(project, dict) else None
    return isinstance(name, str) and normalized(name) == normalized(distribution)


def _read(pyproject: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(pyproject.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{pyproject} cannot be read: {error}") from None


def _installed_from(distribution: str) -> Path | None:
    """Return the ``pyproject.toml`` of an editable installation, whose directory is in
    ``direct_url.json``."""
    try:
        text = metadata.distribution(distribution).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = json.loads(text or "{}").get("url", "")
    parts = urlparse(url)
    return Path(unquote(parts.path)) / "pyproject.toml" if parts.scheme == "file" else None
