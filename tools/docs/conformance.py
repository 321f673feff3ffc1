"""The checks of the conformance suite, as its catalogue lists them."""

from __future__ import annotations

from typing import Any

from tools.docs.tables import cell, code, markdown_table

__all__ = ["checks"]


def checks() -> str:
    """Return a table of the checks for each kind of record; where this version has no catalogue, a sentence that says so."""
    try:
        from quark.testing import CATALOGUE
    except ImportError:
        return "This version has no conformance suite yet."
    kinds: dict[str, list[Any]] = {}
    for check in CATALOGUE.values() if hasattr(CATALOGUE, "values") else CATALOGUE:
        kinds.setdefault(str(check.kind), []).append(check)
    titles = ["check", "level", "needs", "since API", "what it checks"]
    return "\n\n".join(f"### {kind}\n\n{markdown_table(titles, [_row(check) for check in own])}" for kind, own in kinds.items())


def _row(check: Any) -> list[str]:
    return [code(check.id), cell(check.level), cell(check.capability or ""), cell(check.since), cell(check.summary)]
