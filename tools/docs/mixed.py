"""Tables of the mixed-precision choices that `benchmarks.mixed_precision` has stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.mixed_precision import best_alone, is_heuristic
from tools.docs.sections import ROOT
from tools.docs.tables import code, markdown_table

__all__ = ["choices", "measured", "table"]

Row = dict[str, Any]


def measured() -> dict[str, Any]:
    """Return the stored data. There is a row for each scheme alone, and for each choice from a set of
    candidates at a given size."""
    data: dict[str, Any] = json.loads((ROOT / "docs/data/mixed_precision.json").read_text(encoding="utf-8"))
    return data


def choices(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return each choice that was made by predicted losses, together with the best choice of the heuristic
    for the same size."""
    return [(row, min((r for r in rows if is_heuristic(r, row)), key=lambda r: r["kl"])) for row in rows if row["choice"] == "fisher"]


def table() -> str:
    """Return two tables: one with a row for each size of each set of candidates, and one of single
    schemes."""
    rows = measured()["rows"]
    cells = []
    for row, ends in choices(rows):
        best = best_alone(rows, row["target"])
        one = "" if best is None else f"{best['kl']:.3f} ({code(best['candidates'][0])}, {best['bits']:g})"
        names = ", ".join(map(code, row["candidates"]))
        cells.append([names, f"{row['target']:g}", one, f"{ends['kl']:.3f}", f"**{row['kl']:.3f}**", f"{row['perplexity']:.1f}"])
    titles = ["candidates", "bits", "best scheme alone", "ends", "chosen", "perplexity"]
    single = sorted((row for row in rows if row["choice"] == "uniform"), key=lambda row: (row["bits"], row["kl"]))
    each = [[code(row["candidates"][0]), f"{row['bits']:g}", f"{row['kl']:.3f}", f"{row['perplexity']:.1f}"] for row in single]
    return f"{markdown_table(titles, cells)}\n\nEach scheme alone:\n\n{markdown_table(['scheme', 'bits', 'KL', 'perplexity'], each)}"
