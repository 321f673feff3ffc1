"""The table of ``docs/data/heads.json``, which `benchmarks.heads` has measured."""

from __future__ import annotations

import json
from typing import Any

from tools.docs.sections import ROOT
from tools.docs.tables import code, markdown_table

__all__ = ["table"]


def table() -> str:
    """Return a table of models, schemes of the blocks, and schemes of the head with the embeddings."""
    data: dict[str, Any] = json.loads((ROOT / "docs/data/heads.json").read_text(encoding="utf-8"))
    cells = []
    for model, measured in data.items():
        for row in measured["rows"]:
            names = [code(row[part]) if row[part] != "float" else "float" for part in ("body", "head")]
            sizes = [f"{row[part] / 1e6:.0f} MB" for part in ("tied_bytes", "bytes")]
            cells.append([model, *names, f"{row['kl']:.4f} ± {row['error']:.4f}", *sizes])
    return markdown_table(["model", "blocks", "head and embeddings", "KL", "head and embeddings", "all"], cells)
