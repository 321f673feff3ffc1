"""What clients make of exports, as `make clients` has measured it: tables of ``docs/data/clients.json``.

    python -m tools.docs.client_results   # writes the table into the README

The file has, for each client, versions and the results by layout and scheme (`tests/clients/results.py` writes it): ``error`` and
``greedy``, or why it was ``refused``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from quark.plugins.catalog import catalog
from quark.plugins.report import kind_report
from tools.docs.sections import ROOT
from tools.docs.tables import cell, code, markdown_table

__all__ = ["BEGIN", "COLUMNS", "END", "client_results", "in_readme", "readme_table", "reference_table", "schemes"]

DATA = ROOT / "docs/data/clients.json"
BEGIN, END = "<!-- client results: begin -->\n", "<!-- client results: end -->"
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "transformers": ("safetensors",),
    "vLLM on a CPU": ("safetensors", "compressed_tensors", "awq", "fp8"),
    "llama.cpp": ("gguf",),
    "onnxruntime": ("onnx",),
    "compressed-tensors": ("compressed_tensors",),
}
"""Client → the layouts that it reads, the first of which a cell of the README is about where it loads."""
_MEANING = """\
A cell has the relative error of the client's logits, `‖client − model‖ / ‖model‖` without their mean over the vocabulary, and the share of
positions at which both choose the same token, on 128 tokens of held-out text and the model of `make demo`; `model` is the quantized one in
memory. Runtimes round activations themselves and sum in other orders, so that inputs near the edge of a step get another code."""


def client_results() -> dict[str, Any]:
    """Return the content of the file: client → ``versions`` and ``results``, layout → scheme → result."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def schemes() -> list[str]:
    """Return the names of the schemes that the distributions of this repository register."""
    rows = kind_report(catalog(), "schemes")["schemes"]
    return [row["name"] for row in rows if row["source"]["distribution"] == "quark-schemes"]


def readme_table(data: Mapping[str, Any] | None = None) -> str:
    """Return the table of the README: a scheme in each row, or several with the same results; a client in each column."""
    data, reasons = client_results() if data is None else data, _Reasons()
    by_cells: dict[tuple[str, ...], list[str]] = {}
    for scheme in schemes():
        cells = tuple(_cell(_results(data, client, scheme), layouts[0], reasons) for client, layouts in COLUMNS.items())
        by_cells.setdefault(cells, []).append(scheme)
    rows = [[", ".join(code(name) for name in names), *cells] for cells, names in by_cells.items()]
    return _page(data, markdown_table(["scheme", *COLUMNS], rows), reasons, folds=True)


def reference_table(data: Mapping[str, Any] | None = None) -> str:
    """Return the table of the reference: a column for each client and layout."""
    data, reasons = client_results() if data is None else data, _Reasons()
    columns = [(client, layout) for client, layouts in COLUMNS.items() for layout in layouts]
    rows = [
        [code(scheme), *(_cell({layout: _results(data, client, scheme).get(layout)}, layout, reasons) for client, layout in columns)]
        for scheme in schemes()
    ]
    return _page(data, markdown_table(["scheme", *(f"{client}, {code(layout)}" for client, layout in columns)], rows), reasons)


def in_readme(text: str, table: str) -> str:
    """Return the text of the README with another table between the marks.

    Raises:
        ValueError: A mark is missing.
    """
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"README.md has no single place between '{BEGIN.strip()}' and '{END}': put both lines where the table goes")
    return pattern.sub(lambda _: f"{BEGIN}{table}\n{END}", text)


class _Reasons:
    """The reasons of refusals, numbered as they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, reason: str) -> int:
        return self.numbers.setdefault(reason, len(self.numbers) + 1)

    def text(self) -> str:
        return "\n".join(f"{number}. {cell(reason)}" for reason, number in self.numbers.items())


def _results(data: Mapping[str, Any], client: str, scheme: str) -> dict[str, Any]:
    """Return layout → result of one client and scheme; None where it has not been run."""
    own = data.get(client, {}).get("results", {})
    return {layout: own.get(layout, {}).get(scheme) for layout in COLUMNS[client]}


def _cell(results: Mapping[str, Any], first: str, reasons: _Reasons) -> str:
    loaded = {layout: result for layout, result in results.items() if result is not None and "error" in result}
    if loaded:
        layout, result = next(iter(loaded.items()))
        more = [*([f"as {code(layout)}"] if layout != first else []), *([result["note"]] if "note" in result else [])]
        figures = f"{result['error']:g}, {math.floor(100 * result['greedy'])} %".replace("e-0", "e-")
        return figures + (f" ({'; '.join(more)})" if more else "")
    refused = next((result for result in results.values() if result is not None), None)
    return "not run" if refused is None else f"refused: {reasons.number(refused['refused'])}"


def _page(data: Mapping[str, Any], table: str, reasons: _Reasons, *, folds: bool = False) -> str:
    """Return meaning, versions, table and reasons; where it ``folds``, the reasons are shown when they are asked for."""
    versions = {client: data[client]["versions"] for client in COLUMNS if client in data}
    named = [f"- {client}: {', '.join(f'{package} {number}' for package, number in own.items())}" for client, own in versions.items()]
    title = "Refused, by the exporter before any work or by the client:"
    refusals = [title, reasons.text()] if reasons.numbers else []
    if folds and reasons.numbers:
        refusals = [f"<details><summary>{title}</summary>", reasons.text(), "</details>"]
    return "\n\n".join([_MEANING, table, *refusals, "Versions:", "\n".join(named)]) + "\n"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(in_readme(readme.read_text(encoding="utf-8"), readme_table()), encoding="utf-8")
