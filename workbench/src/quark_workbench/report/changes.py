"""Sections of the page on what has changed whole blocks: transforms before the rounding, tunings behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quark_workbench.report.markup import Markup, folded_table, heading, legend, legend_key
from quark_workbench.report.plots import block_errors
from quark_workbench.report.units import decibel_text, share

__all__ = ["transforms_section", "tunings_section"]

Rows = Sequence[Mapping[str, Any]]


def transforms_section(report: Mapping[str, Any]) -> list[Markup]:
    """Return the contents of the section on transforms; empty where a run had none."""
    rows = report["transforms"]
    if not rows:
        return []
    lead = "Output error of each block, rounded to nearest, before and after the transforms; a transform that does not help is undone."
    blocks = [t for t in rows if not t["whole_model"]]
    cells = [[t["name"], *_before_and_after(t), str(t.get("reason") or "")] for t in rows]
    heads = ["Where", "Before", "After", "Applied", "Reason"]
    return [
        *heading("transforms", "Transforms", lead),
        *_plot("plot-transforms", "transforms", "rounded to nearest", blocks),
        folded_table("Table of transforms", "Output errors as ratios.", heads, cells),
    ]


def tunings_section(report: Mapping[str, Any]) -> list[Markup]:
    """Return the contents of the section on tunings; empty where a run had none."""
    rows = report.get("tunings", [])
    if not rows:
        return []
    lead = "Output error of each rounded block before and after it was tuned; where it did not fall, the block is as it was rounded."
    content = heading("tunings", "Tuning", lead)
    for number, tuning in enumerate(dict.fromkeys(t["algorithm"] for t in rows)):
        content += _plot(f"plot-tuning-{number}", tuning, "rounded as in the checkpoint", [t for t in rows if t["algorithm"] == tuning])
    cells = [[t["name"], *_before_and_after(t), t["algorithm"], _loss(t), share(t["codes"]) if "codes" in t else "–"] for t in rows]
    heads = ["Block", "Before", "After", "Kept", "Tuning", "Loss", "Codes"]
    return [*content, folded_table("Table of tunings", "Output errors as ratios; last loss ÷ first; share of codes changed.", heads, cells)]


def _before_and_after(row: Mapping[str, Any]) -> list[str]:
    return [decibel_text(row["snr_before_db"]), decibel_text(row["snr_after_db"]), "yes" if row.get("applied") else "no"]


def _loss(row: Mapping[str, Any]) -> str:
    """Return the last loss of a tuning ÷ its first; a dash where it reports none."""
    first, last = row.get("first_loss"), row.get("last_loss", row.get("best_loss"))
    return f"{last / first:.3f}" if first and last is not None else "–"


def _plot(name: str, changes: str, rounded: str, rows: Rows) -> list[Markup]:
    """Return a plot of more than one block whose errors are known, with its legend."""
    known = [row for row in rows if row["snr_before_db"] is not None and row["snr_after_db"] is not None]
    if len(known) < 2:
        return []
    return [legend(legend_key("p-solve", "after"), legend_key("p-report", "before")), block_errors(name, changes, rounded, known)]
