"""Tables of the installed records in Markdown, for the reference pages."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Any

from quark.checkpoint.export import exporter_options
from quark.plugins import CAPABILITIES
from quark.plugins.catalog import catalog
from quark_workbench.cli.installed import kind_report
from quark_workbench.evaluate import PROTOCOLS

__all__ = ["capabilities", "cell", "clients", "markdown_table", "options_of", "protocols", "table_of"]

_COLUMNS: dict[str, dict[str, str]] = {
    "formats": {"format": "name", "bits": "bits", "summary": "summary"},
    "observers": {"observer": "name", "class": "class_name", "summary": "summary"},
    "schemes": {
        "scheme": "name",
        "bits": "effective_bits",
        "weights": "weight",
        "activations": "input",
        "calibration data": "needs_calibration",
        "KV cache": "kv_cache",
        "summary": "summary",
    },
    "algorithms": {"algorithm": "name", "kind": "kind", "role": "role", "before": "before", "after": "after", "summary": "summary"},
    "templates": {"model type": "name", "models": "summary", "decoder blocks": "decoder_blocks", "left in float": "exclude_layers_name"},
    "exporters": {
        "exporter": "name",
        "writes": "exporter",
        "loads": "reader",
        "source": "dequantizer",
        "quant_method": "quant_methods",
        "summary": "summary",
    },
    "selectors": {"selector": "name", "summary": "summary"},
    "layer_types": {"layer type": "name", "layer": "layer", "quantized": "quantized", "planned as": "planned_as", "summary": "summary"},
    "datasets": {"dataset": "name", "files": "suffixes", "downloaded": "is_online", "summary": "summary"},
    "metrics": {"metric": "name", "reference model": "needs_reference", "summary": "summary"},
    "quant_modes": {"quantization mode": "name", "summary": "summary"},
    "graph_ops": {"operator": "name", "operators of torch": "operators", "modules": "modules", "moves values": "moves_values"},
    "commands": {"command": "name", "heading": "group", "does": "summary"},
}
"""For each kind, titles of columns and the columns' keys in `quark_workbench.cli.installed.kind_report`.

The first column is the name.
"""
_YES = ("needs_calibration", "kv_cache", "exporter", "reader", "dequantizer", "is_online", "needs_reference", "moves_values")
"""Keys for which the table shows only whether they have a value."""
_CODE = (
    *("name", "class_name", "decoder_blocks", "exclude_layers_name", "quant_methods", "layer", "quantized", "suffixes"),
    *("operators", "modules"),
)
"""Keys whose values are written as code."""


def cell(text: object) -> str:
    """Return a text as a table cell, with Markdown and HTML escaped."""
    return re.sub(r"([\\`*_\[\]|{}~])", r"\\\1", html.escape(" ".join(str(text).split()), quote=False))


def code(text: object) -> str:
    """Return a text as code for the cell of a table. An empty text stays empty."""
    plain = " ".join(str(text).split()).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain else ""


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown. Columns that are empty in every row are left out. The given cells are
    Markdown."""
    used = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    lines = [[titles[i] for i in used], ["---"] * len(used), *([row[i] for i in used] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(kind: str) -> str:
    """Return the table of all records of a kind, such as ``"schemes"``."""
    columns = {**_COLUMNS[kind], "aliases": "aliases"}
    rows = kind_report(catalog(), kind)[kind]
    return markdown_table(list(columns), [[_value(row, key) for key in columns.values()] for row in rows])


def _value(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if key in _YES:
        return "yes" if value else ""
    if key in _CODE or key == "aliases":
        return ", ".join(code(text) for text in (value if isinstance(value, list) else [value or ""]))
    if isinstance(value, float):
        return f"{value:.4g}"
    return cell(", ".join(value) if isinstance(value, list) else "" if value is None else value)


def options_of(kind: str) -> str:
    """Return a section with a table for each record of a kind that has options."""
    sections = []
    for record in catalog().registries[kind]:
        options = exporter_options(record.name) if kind == "exporters" else catalog().registries[kind].options(record.name)
        if options:
            facts = [option.to_dict() for option in options]
            rows = [
                [code(o["name"]), code(o["type"]), "required" if o["required"] else code(json.dumps(o["default"])), cell(o["help"])]
                for o in facts
            ]
            sections.append(f"### Options of {record.name}\n\n{markdown_table(['option', 'type', 'default', 'meaning'], rows)}")
    return "\n\n".join(sections)


def clients() -> str:
    """Return the table of clients, with a scheme in each row and a program in each column."""
    rows: list[dict[str, Any]] = kind_report(catalog(), "schemes")["schemes"]
    claims = {row["name"]: dict(_client(text) for text in row["clients"]) for row in rows}
    programs = list(dict.fromkeys(program for claim in claims.values() for program in claim))
    cells = [[code(name), *(cell(claim.get(program, "")) for program in programs)] for name, claim in claims.items()]
    return markdown_table(["scheme", *programs], cells)


def capabilities() -> str:
    """Return the table of the capabilities that a record may declare."""
    rows = [[code(name), *(cell(part) for part in meaning.split(": ", 1))] for name, meaning in CAPABILITIES.items()]
    return markdown_table(["capability", "of", "meaning"], rows)


def protocols() -> str:
    """Return the table of the protocols of ``quark evaluate``."""
    return markdown_table(["protocol", "meaning"], [[code(name), cell(protocol.about)] for name, protocol in PROTOCOLS.items()])


def _client(text: str) -> tuple[str, str]:
    """Return a program and its requirements: ``"vLLM (CUDA, ROCm)"`` is ``("vLLM", "CUDA, ROCm")``."""
    program, _, needs = text.partition(" (")
    return program, needs.removesuffix(")") or "yes"
