"""Tables of ``docs/data/clients.json``, the results of `make clients`.

`tests/clients/results.py` writes the file. The file has versions for each client, and results by layout and
scheme. A result has the fields ``error`` and ``greedy``, or the field ``refused`` with the reason why the
client or the exporter refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from quark.plugins.catalog import catalog
from quark_workbench.cli.installed import kind_report
from tools.docs.sections import ROOT
from tools.docs.tables import cell, code, markdown_table

__all__ = ["COLUMNS", "client_results", "schemes", "tables"]

DATA = ROOT / "docs/data/clients.json"
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "transformers": ("safetensors",),
    "vLLM on a CPU": ("safetensors", "compressed_tensors", "awq", "fp8"),
    "vLLM with quark-vllm": ("safetensors",),
    "llama.cpp": ("gguf",),
    "onnxruntime": ("onnx",),
    "compressed-tensors": ("compressed_tensors",),
}
"""Client → the layouts that it reads; the table by client shows the first layout that loads.
"""
_MEANING = """\
A cell has the relative error of the client's logits, `‖client − model‖ / ‖model‖` without their mean over the
vocabulary, and the share of positions with the same best token, on 128 tokens of held-out text and the model
of `make demo`. `model` is the quantized model in memory. Runtimes round activations themselves and sum in
other orders, so inputs near the edge of a step get another code."""


def client_results() -> dict[str, Any]:
    """Return the content of the file. Each client has ``versions`` and ``results``, which map a layout and a
    scheme to a result."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def schemes() -> list[str]:
    """Return the names of the schemes that the distributions of this repository register."""
    rows = kind_report(catalog(), "schemes")["schemes"]
    return [row["name"] for row in rows if row["source"]["distribution"] in ("quark-schemes", "quark-vq")]


def tables(data: Mapping[str, Any] | None = None) -> str:
    """Return tables by client and by layout, with a legend, the reasons of refusals, and versions.

    Args:
        data: Content of a results file; by default, that of the repository's file.
    """
    data, reasons = client_results() if data is None else data, _Reasons()
    by_client, by_layout = _by_client(data, reasons), _by_layout(data, reasons)
    refusals = ["## Refusals", "By the exporter before any work, or by the client:", reasons.text()] if reasons.numbers else []
    versions = {client: data[client]["versions"] for client in COLUMNS if client in data}
    named = [f"- {client}: {', '.join(f'{package} {number}' for package, number in own.items())}" for client, own in versions.items()]
    parts = [_MEANING, by_client, "## By layout", by_layout, *refusals, "## Versions", "\n".join(named)]
    return "\n\n".join(parts) + "\n"


def _by_client(data: Mapping[str, Any], reasons: _Reasons) -> str:
    """Return a table with a client in each column. Schemes with equal results share a row."""
    by_cells: dict[tuple[str, ...], list[str]] = {}
    for scheme in schemes():
        cells = tuple(_cell(_results(data, client, scheme), layouts[0], reasons) for client, layouts in COLUMNS.items())
        by_cells.setdefault(cells, []).append(scheme)
    rows = [[", ".join(code(name) for name in names), *cells] for cells, names in by_cells.items()]
    return markdown_table(["scheme", *COLUMNS], rows)


def _by_layout(data: Mapping[str, Any], reasons: _Reasons) -> str:
    """Return a table with a scheme in each row, and with a pair of client and layout in each column."""
    columns = [(client, layout) for client, layouts in COLUMNS.items() for layout in layouts]
    rows = [
        [code(scheme), *(_cell({layout: _results(data, client, scheme).get(layout)}, layout, reasons) for client, layout in columns)]
        for scheme in schemes()
    ]
    return markdown_table(["scheme", *(f"{client}, {code(layout)}" for client, layout in columns)], rows)


class _Reasons:
    """The reasons of refusals, numbered in order of appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, reason: str) -> int:
        return self.numbers.setdefault(reason, len(self.numbers) + 1)

    def text(self) -> str:
        return "\n".join(f"{number}. {cell(reason)}" for reason, number in self.numbers.items())


def _results(data: Mapping[str, Any], client: str, scheme: str) -> dict[str, Any]:
    """Return the result of one client and scheme for each layout; None for a layout that was not run."""
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
