"""The table of ``docs/data/neighbours.json``, the results of `make neighbours`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.docs.sections import ROOT
from tools.docs.tables import code, markdown_table
from tools.neighbours import NEIGHBOURS

__all__ = ["results", "table"]


def results() -> dict[str, Any]:
    """Return the content of the file. For each neighbour, it has the installation, versions, the changes by
    quark, and the steps."""
    data: dict[str, Any] = json.loads((ROOT / "docs/data/neighbours.json").read_text(encoding="utf-8"))
    return data


def table(data: Mapping[str, Any] | None = None) -> str:
    """Return a table with a neighbour in each column.

    Args:
        data: Content of a results file; by default, that of the repository's file.
    """
    data = results() if data is None else data
    columns = [data[name] for name in NEIGHBOURS if name in data]
    steps = dict.fromkeys(step for column in columns for step in column["steps"])
    rows = [
        ["installed by", *(code(column["install"]) for column in columns)],
        ["versions", *map(_versions, columns)],
        ["quark adds", *(_listed(column["added"]) for column in columns)],
        ["quark changes", *(_listed(column["changed"]) for column in columns)],
        ["`pip check` complains anew", *(_listed(column["complaints"]) for column in columns)],
        *([step, *(column["steps"].get(step, "–") for column in columns)] for step in steps),
    ]
    return markdown_table(["", *(name for name in NEIGHBOURS if name in data)], rows)


def _versions(column: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name} {version}" for name, version in column["versions"].items())
    return text if column["has_that_torch"] else f"{text} (this torch came from an index other than the command's)"


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing"
