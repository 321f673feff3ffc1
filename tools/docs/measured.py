"""Measured accuracy of round-to-nearest (`tools.docs.measure`) and algorithms (`benchmarks.calibrated`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quark.plugins.catalog import catalog
from quark_workbench.cli.installed import kind_report
from tools.docs.sections import ROOT
from tools.docs.tables import cell, code, markdown_table

__all__ = ["calibrated", "round_to_nearest", "schemes", "table"]


def round_to_nearest() -> Mapping[str, Any]:
    """Return the stored measurement: perplexity by scheme, and its protocol."""
    data: dict[str, Any] = json.loads((ROOT / "docs/data/round_to_nearest.json").read_text(encoding="utf-8"))
    return data


def schemes() -> dict[str, dict[str, Any]]:
    """Return the facts of each scheme by name."""
    return {row["name"]: row for row in kind_report(catalog(), "schemes")["schemes"]}


def calibrated() -> dict[str, dict[str, dict[str, float]]]:
    """Return the results of `benchmarks.calibrated`: perplexity and mean divergence by algorithm and scheme.

    ``"none"`` stands for no algorithm.
    """
    data: dict[str, Any] = json.loads((ROOT / "docs/data/calibrated.json").read_text(encoding="utf-8"))
    return dict(data["accuracy"])


def table() -> str:
    """Return the table of round-to-nearest perplexities, best first, and the schemes that do not fit."""
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
