"""The catalogue of the conformance suite: checks of each kind, levels, outcomes."""

from __future__ import annotations

from quark_devkit.catalogue import checks_of
from quark_devkit.runner import OUTCOMES
from quark_devkit.subject import KINDS
from tools.docs.tables import cell, code, markdown_table

__all__ = ["checks", "outcomes"]


def checks() -> str:
    """Return a section for each kind of subject, with the requirement of each check."""
    return "\n\n".join(f"### {kind}\n\n{_table(kind)}" for kind in KINDS)


def outcomes() -> str:
    """Return the table of the outcomes of a check."""
    return markdown_table(["outcome", "meaning"], [[cell(name), cell(meaning)] for name, meaning in OUTCOMES.items()])


def _table(kind: str) -> str:
    rows = [[code(c.name), cell(c.sentence), cell(c.level), code(c.needs or ""), str(c.since)] for c in checks_of(kind)]
    return markdown_table(["check", "requires", "level", "of records with", "since API"], rows) if rows else "This version has none."
