"""Tables of the comparisons of settings that `benchmarks.defaults` has stored."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import Difference, counts, overall
from benchmarks.pooling import Row, measures_of, pooled, row_of
from tools.docs.sections import ROOT
from tools.docs.tables import cell, code, markdown_table

__all__ = ["RESULTS", "page"]

RESULTS = ROOT / "docs/data/defaults.json"
Cells = Sequence[Mapping[str, Any]]


def page(path: Path = RESULTS) -> str:
    """Return a section for each stored comparison, the newest first."""
    comparisons = json.loads(path.read_text(encoding="utf-8"))["comparisons"] if path.exists() else []
    if not comparisons:
        return "No comparison has been recorded yet."
    return "\n\n".join(_section(comparison) for comparison in reversed(comparisons))


def _section(comparison: Mapping[str, Any]) -> str:
    first, *others = comparison["settings"]
    cells, versions = comparison["cells"], ", ".join(f"{name} {version}" for name, version in comparison["versions"].items())
    named = "; ".join(f"{cell(name)}: {code(text.partition('=')[2])}" for name, text in comparison["settings"].items())
    protocol = f"{comparison['windows']} × {comparison['length']} tokens of each text, {comparison['calibration_windows']} × "
    protocol += f"{comparison['length']} of calibration, {comparison['dtype']}; {versions}"
    if comparison.get("device", "cpu") != "cpu":
        protocol += f"; models on {comparison['device']}"
    if "blocks" in comparison:
        protocol += f"; the first {comparison['blocks']} decoder blocks alone are quantized"
    heading = f"### {comparison['created'][:10]}: {cell(', '.join(others))} against {cell(first)}"
    return "\n\n".join(
        [heading, f"{named}. {cell(protocol)}.", *(_verdict(cells, first, other) for other in others), _table(cells, first, others)]
    )


def _verdict(cells: Cells, first: str, other: str) -> str:
    verdicts = [row_of(one, first, other).change.verdict for one in cells]
    numbers = ", ".join(f"{count} {name}" for name, count in counts(verdicts).items())
    measures = " and ".join(measures_of(cells))
    return f"**{cell(other)}: {overall(verdicts)}**, {measures} {_percent(pooled(cells, first, other))}; cells: {numbers}."


def _table(cells: Cells, first: str, others: Sequence[str]) -> str:
    """Return a table with a row for each cell of a comparison. Each setting except the first has two
    columns."""
    rows = []
    for one in cells:
        compared = {other: row_of(one, first, other) for other in others}
        row = compared[others[0]]
        where = [cell(one["model"]), str(one["seed"]), code(one["scheme"]), f"{cell(one['calibration'])} → {cell(one['evaluation'])}"]
        changes = [text for other in others for text in (_change(compared[other].change), _perplexity(compared[other]))]
        rows.append([*where, f"{row.mean:.4f}", "" if row.perplexity is None else f"{row.perplexity[0]:.2f}", *changes])
    measure = " or ".join(measures_of(cells))
    titles = ["model", "seed", "scheme", "text", f"{measure}, {cell(first)}", "perplexity"]
    return markdown_table([*titles, *(text for other in others for text in (f"{measure}, {cell(other)}", "perplexity ×"))], rows)


def _change(change: Difference) -> str:
    error = "" if change.error is None else f" ± {change.error:.4f}"
    return f"{change.mean:+.4f}{error}, {change.verdict}"


def _perplexity(row: Row) -> str:
    return "" if row.perplexity is None else f"{math.exp(row.perplexity[1].mean):.3f}"


def _percent(change: Difference) -> str:
    error = "" if change.error is None else f" ± {100 * math.exp(change.mean) * change.error:.1f}"
    return f"{100 * math.expm1(change.mean):+.1f}{error} % over {change.units} sequences"
