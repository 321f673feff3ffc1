"""Measured accuracy: perplexities that `tools.docs.measure` has stored, and those in the README of the algorithms, which owns them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quark.plugins.catalog import catalog
from quark.plugins.report import kind_report
from tools.docs.sections import ROOT
from tools.docs.tables import cell, code, markdown_table

__all__ = ["calibrated", "round_to_nearest", "schemes", "table"]


def round_to_nearest() -> Mapping[str, Any]:
    """Return what the measurement has stored: perplexity by scheme, and its protocol."""
    data: dict[str, Any] = json.loads((ROOT / "docs/data/round_to_nearest.json").read_text(encoding="utf-8"))
    return data


def schemes() -> dict[str, dict[str, Any]]:
    """Return the facts of each scheme by name."""
    return {row["name"]: row for row in kind_report(catalog(), "schemes")["schemes"]}


def calibrated() -> dict[str, dict[str, float]]:
    """Return the perplexity of each algorithm by scheme, from the table of ``plugins/quark_algos/README.md`` whose columns are schemes."""
    text = (ROOT / "plugins/quark_algos/README.md").read_text(encoding="utf-8")
    lines = re.search(r"^(\| \| int4_wo_64 .*?)(?:\n\n)", text, flags=re.MULTILINE | re.DOTALL)
    if lines is None:
        raise ValueError("plugins/quark_algos/README.md has no table with a column for each scheme")
    titles, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1].splitlines()]
    return {row[0]: {scheme: float(text.split(",")[0]) for scheme, text in zip(titles[1:], row[1:], strict=True)} for row in rows}


def table() -> str:
    """Return the table of perplexities with round-to-nearest, best first, and which schemes are not in it."""
    facts, measured, refused = schemes(), round_to_nearest()["perplexity"], round_to_nearest()["refused"]
    rows = [
        [code(name), f"{facts[name]['effective_bits']:.4g}", facts[name]["weight"], facts[name]["input"], f"{measured[name]:.2f}"]
        for name in sorted(measured, key=measured.__getitem__)
        if name in facts
    ]
    titles = ["scheme", "bits", "weights", "activations", "perplexity"]
    remarks = [f"{code(name)} does not fit this model: {cell(reason)}." for name, reason in refused.items()]
    if missing := [code(name) for name in facts if name not in {**measured, **refused}]:
        remarks.append(f"Not measured: {', '.join(missing)}.")
    return "\n\n".join([markdown_table(titles, [["float model", "32", "", "", f"{measured['float']:.2f}"], *rows]), *remarks])
