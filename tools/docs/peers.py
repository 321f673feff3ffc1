"""Tables of the comparisons with other programs that `benchmarks.peers` has stored."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.peers import OURS
from tools.docs.sections import ROOT
from tools.docs.tables import code, markdown_table

__all__ = ["cost", "measured", "table"]

Row = dict[str, Any]


def measured() -> list[Row]:
    """Return the stored rows. Each row is a run of one algorithm of a program, with a scheme, on a model."""
    rows: list[Row] = json.loads((ROOT / "docs/data/peers.json").read_text(encoding="utf-8"))["rows"]
    return rows


def cost(row: Row) -> float:
    """Return the CPU time of quantization, divided by the CPU time of a forward pass of the float model over
    the same tokens."""
    return float(row["cpu"] / row["forward_cpu"])


def table() -> str:
    """Return a table for each model. Rows are sorted by scheme, in the measured order, and then by
    perplexity."""
    rows = measured()
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        schemes = list(dict.fromkeys(row["scheme"] for row in of_model))
        ordered = sorted(of_model, key=lambda row: (schemes.index(row["scheme"]), row["perplexity"]))
        titles = ["scheme", "program", "algorithm", "perplexity", "KL", "top-1", "forwards", "memory, MiB"]
        parts += [
            f"### {model}, perplexity {of_model[0]['float_perplexity']:.2f} in float",
            markdown_table(titles, list(map(_cells, ordered))),
        ]
    versions = {row["program"]: row["version"] for row in rows}
    return "\n\n".join([*parts, f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}."])


def _cells(row: Row) -> list[str]:
    name = f"**{row['program']}**" if row["program"] == OURS else row["program"]
    algorithm = "round-to-nearest" if row["algorithm"] == "none" else code(row["algorithm"])
    figures = [f"{row['perplexity']:.2f}", f"{row['mean_kl']:.3f}", f"{row['top1']:.3f}", f"{cost(row):.1f}"]
    return [code(row["scheme"]), name, algorithm, *figures, "" if row["peak"] is None else f"{row['peak'] / 2**20:.0f}"]
