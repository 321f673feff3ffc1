"""The table of ``docs/data/low_bits.json``: models in 2 and 3 bits, measured by `benchmarks.defaults`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.paired import Difference
from tools.docs.measured import schemes
from tools.docs.sections import ROOT
from tools.docs.tables import cell, code, markdown_table

__all__ = ["table"]

SETTING = "tuned"
"""The setting of `benchmarks.defaults` in which a model is calibrated by AWQ, GPTQ and tuning."""


def table() -> str:
    """Return a table with a row for each model and scheme, and a column of KL divergences for each text."""
    data: dict[str, Any] = json.loads((ROOT / "docs/data/low_bits.json").read_text(encoding="utf-8"))
    cells = [one for comparison in data["comparisons"] for one in comparison["cells"]]
    models, texts = (list(dict.fromkeys(one[key] for one in cells)) for key in ("model", "evaluation"))
    found = {(one["model"], one["scheme"], one["evaluation"]): _kl(one) for one in cells}
    facts = schemes()
    names = sorted(dict.fromkeys(one["scheme"] for one in cells), key=lambda name: -facts[name]["effective_bits"])
    rows = [
        [cell(model), code(name), f"{facts[name]['effective_bits']:.4g}", *(found[model, name, text] for text in texts)]
        for model in models
        for name in names
        if (model, name, texts[0]) in found
    ]
    return markdown_table(["model", "scheme", "bits", *(f"KL on {cell(text)}" for text in texts)], rows)


def _kl(one: Mapping[str, Any]) -> str:
    """Return the mean KL divergence of a cell with its standard error over the sequences."""
    mean = Difference.of(one["values"][SETTING]["kl"])
    return f"{mean.mean:.2f} ± {mean.error or 0:.2f}"
