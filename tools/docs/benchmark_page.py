"""The page of benchmarks. It has the full last results of ``make bench``, and a line for each earlier run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.docs.sections import ROOT
from tools.docs.tables import cell, markdown_table

__all__ = ["RESULTS", "page"]

_TITLES = {"×": "floor ×", "perplexity": "perplexity", "nats": "KL, nats", "GiB": "GiB"}
RESULTS = ROOT / "docs/data/benchmarks.json"


def page(path: Path = RESULTS) -> str:
    """Return the page: a table for the newest results of each benchmark, with their date and machine, and a
    line for each earlier run."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    if not runs:
        return "No run has been recorded yet."
    last = runs[-1]
    parts = [f"Last run: {last['created'][:10]}, {_machine(last)}."]
    newest = {name: (run, rows) for run in runs for name, rows in _by_benchmark(run).items()}
    for name, (run, rows) in newest.items():
        when = "" if run is last else f" Measured on {run['created'][:10]}, {_machine(run)}."
        parts += [f"### {cell(name)}", f"Floor: {cell(', '.join(dict.fromkeys(row['floor'] for row in rows)))}.{when}", _table(rows)]
    if len(runs) > 1:
        parts += ["### Earlier runs", "Geometric means of the ratios of each benchmark.", _history(runs)]
    return "\n\n".join(parts)


def _machine(run: Mapping[str, Any]) -> str:
    machine, versions = run["machine"], ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine.get("memory_bytes") else "unknown memory"
    device = "" if machine["device"] == "cpu" else f"{machine['device']}; "
    return cell(
        f"{device}{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, {memory}; {machine['system']}; {versions}"
    )


def _by_benchmark(run: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for one in run["measurements"]:
        rows.setdefault(one["benchmark"], []).append(one)
    return rows


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [[cell(row["case"]), _value(row["value"], row["unit"]), _bar(row)] for row in rows]
    return markdown_table(["case", _TITLES.get(rows[0]["unit"], "measured"), "bar"], cells)


def _value(value: float, unit: str) -> str:
    plain = {"×": f"{value:.2f}×", "s": f"{value:+.2f} s"}
    return plain.get(unit, f"{value:.3f}" if unit == "nats" else f"{value:.2f}")


def _bar(row: Mapping[str, Any]) -> str:
    """Return the bar, and whether the figure meets the bar; an empty text if there is no bar."""
    if row["bar"] is None:
        return ""
    return f"{row['bar']:g} {row['unit']}, {'met' if row['value'] <= row['bar'] else 'missed'}"


def _history(runs: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in _by_benchmark(run)))
    rows = []
    for run in reversed(runs):
        by_name = _by_benchmark(run)
        means = [_mean([row["value"] for row in by_name.get(name, []) if row["unit"] == "×"]) for name in names]
        rows.append([run["created"][:10], cell(run["versions"]["quark"]), cell(run["machine"]["processor"]), *means])
    return markdown_table(["date", "quark", "processor", *map(cell, names)], rows)


def _mean(ratios: Sequence[float]) -> str:
    positive = [ratio for ratio in ratios if ratio > 0]
    return f"{math.exp(sum(map(math.log, positive)) / len(positive)):.2f}" if positive else ""
