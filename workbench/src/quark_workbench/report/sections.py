"""Sections of the page in reading order; those on findings, sizes, time, settings and files are here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from quark.base.names import folded
from quark.calibration.phases import PHASES
from quark_workbench.report.error_sections import (
    depth_section,
    experts_section,
    gain_section,
    layers_section,
    transforms_section,
    tunings_section,
    worst_section,
)
from quark_workbench.report.flags import AMBER, RED
from quark_workbench.report.markup import Markup, figure_text, folded_table, heading, legend, legend_key, table, tag
from quark_workbench.report.plots import size_bars, time_by_block
from quark_workbench.report.selection import selection_section
from quark_workbench.report.units import amount, bits, decibel_text, plural, seconds_text, share, size_text

__all__ = ["big_numbers", "sections"]

Report = Mapping[str, Any]


def sections(report: Report) -> list[tuple[str, str, Markup]]:
    """Return the sections that a report has something for: id, title for the list of links, markup."""
    made = (
        ("flags", "Findings", _flags(report)),
        ("layers", "Layers", layers_section(report)),
        ("selection", "Choice of schemes", selection_section(report)),
        ("gain", "Gain of the algorithm", gain_section(report)),
        ("depth", "Depth", depth_section(report)),
        ("transforms", "Transforms", transforms_section(report)),
        ("tunings", "Tuning", tunings_section(report)),
        ("worst", "Worst layers", worst_section(report)),
        ("experts", "Experts", experts_section(report)),
        ("sizes", "Sizes", _sizes(report)),
        ("time", "Time", _time(report)),
        ("settings", "Settings and files", list(_settings(report))),
    )
    return [(key, name, tag("section", *content, id=key, aria_labelledby=f"{key}-heading")) for key, name, content in made if content]


def big_numbers(report: Report) -> Markup:
    """Return the line of big numbers."""
    sizes, seconds = report["sizes"], report["time"]["seconds"]
    ratios = [layer["snr_db"] for layer in report["layers"] if layer["snr_db"] is not None]
    red, amber = (sum(flag["level"] == level for flag in report["flags"]) for level in (RED, AMBER))
    numbers: list[tuple[str, str, str]] = []
    if sizes["stored_bytes"] is not None:
        smaller = f"from {size_text(sizes['float_bytes'])}, {sizes['float_bytes'] / max(sizes['stored_bytes'], 1):.1f} times smaller"
        numbers.append(("Size", size_text(sizes["stored_bytes"]), smaller))
    if sizes["effective_bits"] is not None:
        numbers.append(("Bits per weight", bits(sizes["effective_bits"]), "of quantized layers, with scales"))
    if ratios:
        numbers.append(("Weights", decibel_text(statistics.median(ratios)), f"median ratio; lowest {decibel_text(min(ratios))}"))
    outputs = [layer["output_snr_db"] for layer in report["layers"] if layer.get("output_snr_db") is not None]
    if outputs:
        numbers.append(("Outputs", decibel_text(statistics.median(outputs)), f"median ratio; lowest {decibel_text(min(outputs))}"))
    if seconds:
        numbers.append(("Time", seconds_text(seconds), _calibration(report)))
    numbers.append(("Findings", str(red + amber), f"{red} red, {amber} amber" if red + amber else "nothing to look at"))
    return tag(
        "dl",
        *(tag("div", tag("dt", n), tag("dd", big, class_="big"), tag("dd", small, class_="small")) for n, big, small in numbers),
        class_="numbers",
    )


def _calibration(report: Report) -> str:
    data = report["settings"]["calibration"]
    return f"{data['tokens']:,} calibration tokens" if data["samples"] else "without calibration data"


def _flags(report: Report) -> list[Markup]:
    nothing = tag("p", "Nothing crosses a threshold.", class_="what"), tag("p", "Evaluate the model all the same.")
    items = [_flag(flag) for flag in report["flags"]] or [tag("li", _sign("good"), *nothing, class_="flag good")]
    rows = [[name.replace("_", " "), f"{value:g}"] for name, value in report["thresholds"].items()]
    lead = "What a threshold was crossed by, and what to do about it. Whether the model is good enough, quark evaluate tells."
    return [
        *heading("flags", "Findings", lead),
        tag("ul", *items, class_="flags"),
        folded_table("Thresholds", "When a finding is shown.", ["Threshold", "Value"], rows),
    ]


def _flag(flag: Mapping[str, Any]) -> Markup:
    names, listed = flag["layers"], None
    if names:
        shown = tag("p", tag("code", folded(names[:400], most=24)))
        listed = tag("details", tag("summary", f"Which: {plural(len(names), 'name')}"), shown)
    level = tag("span", f"{flag['level'].capitalize()}. ", class_="level")
    said = tag("p", level, flag["title"], class_="what"), tag("p", flag["advice"])
    return tag("li", _sign(flag["level"]), *said, listed, class_=f"flag {flag['level']}")


_SIGNS = {
    RED: ("M6 1h8l5 5v8l-5 5H6l-5-5V6z", "M10 5v6M10 13.6v1.6"),
    AMBER: ("M10 1 19.5 18H.5z", "M10 7v5M10 14v1.8"),
    "good": ("M10 1a9 9 0 1 0 0 18 9 9 0 0 0 0-18z", "m5.6 10.4 3 3 5.8-6.6"),
}
"""Outline and mark of each sign."""


def _sign(level: str) -> Markup:
    """Return a sign whose shape, not its colour alone, tells the level."""
    outline, mark = _SIGNS[level]
    drawn = tag("path", d=outline, fill="currentColor"), tag("path", d=mark, class_="mark")
    return tag("svg", *drawn, viewBox="0 0 20 20", aria_hidden="true")


def _sizes(report: Report) -> list[Markup]:
    sizes = report["sizes"]
    kinds = sorted(sizes["kinds"], key=lambda kind: -kind["float_bytes"])[:24]
    if not kinds:
        return []
    rows = [
        [
            k["kind"],
            str(k["layers"] or "–"),
            amount(k["weights"]),
            size_text(k["float_bytes"]),
            "–" if k["stored_bytes"] is None else size_text(k["stored_bytes"]),
            figure_text(k["bits"], ".2f"),
        ]
        for k in kinds
    ]
    total = "" if sizes["stored_bytes"] is None else f" In all {size_text(sizes['float_bytes'])} became {size_text(sizes['stored_bytes'])}."
    bars = (("bar-float", "float model"), ("bar", "stored, quantized"), ("bar plain", "stored, not quantized"))
    keys = legend(*(legend_key(class_, name) for class_, name in bars))
    heads = ["Kind of layer", "Layers", "Weights", "Float", "Stored", "Bits"]
    lead = f"Bytes of the tensors, scales and zero points included.{total}"
    return [*heading("sizes", "Sizes", lead), keys, size_bars(kinds), folded_table("Table of sizes", "By kind of layer.", heads, rows)]


def _time(report: Report) -> list[Markup]:
    time = report["time"]
    rows = [row for row in time["blocks"] if row["seconds"]]
    if not rows:
        return []
    spent = {phase: sum(row["seconds"].get(phase, 0.0) for row in rows) for phase in PHASES}
    used = [phase for phase, seconds in spent.items() if seconds > 1e-4 * sum(spent.values())]
    keys = legend(*(legend_key(f"p-{phase}", phase) for phase in used))
    cells = [[p["phase"], seconds_text(p["seconds"]), _moved(p), share(p["share_of_limit"])] for p in time["phases"] if p["phase"] in used]
    probe = report["machine"]["probe"]
    speeds = f" Its limits: {probe['copy_bytes_per_second'] / 1e9:.1f} GB/s copied, {probe['flops'] / 1e9:.0f} GFLOP/s." if probe else ""
    caption = f"Share of the limit: the least time for these bytes and operations on this machine ÷ the time spent.{speeds}"
    heads = ["Phase", "Time", "Counted work", "Share of the limit"]
    lead = f"{seconds_text(time['seconds'])} in all. " if time["seconds"] else ""
    blocks = [[row["block"], *(seconds_text(row["seconds"].get(p, 0.0)) for p in used)] for row in rows]
    return [
        *heading("time", "Time", f"{lead}Where the run spent it, block by block."),
        keys,
        time_by_block(rows),
        table(caption, heads, cells),
        folded_table("Table of blocks", "Time by block and phase.", ["Block", *used], blocks),
    ]


def _moved(phase: Mapping[str, Any]) -> str:
    parts = [size_text(phase["bytes"])] if phase["bytes"] else []
    return ", ".join([*parts, *([f"{phase['flops'] / 1e9:,.1f} GFLOP"] if phase["flops"] else [])]) or "–"


def _settings(report: Report) -> Iterator[Markup]:
    yield from heading("settings", "Settings and files", "What was asked for, what it was made with, and what lies in the directory.")
    settings, machine = report["settings"], report["machine"]
    layers = [[row["layers"], row["quantized_to"], row["reason"], str(row["count"])] for row in settings["layers"]]
    yield folded_table("Plan", "What layers get, and which rule said so.", ["Layers", "Quantized to", "Rule", "Count"], layers, text=3)
    for algorithm in settings["algorithms"]:
        shown = [[str(key), json.dumps(value, ensure_ascii=False)] for key, value in algorithm.items() if key != "name"]
        yield folded_table(f"Algorithm {algorithm.get('name')}", "Its settings.", ["Setting", "Value"], shown, text=2)
    facts = [[str(key), str(value)] for key, value in machine.items() if key != "probe"]
    data = [[f"calibration {name}", f"{settings['calibration'][name]:,}"] for name in ("samples", "tokens")]
    command = [["command", settings["command"]]] if settings["command"] else []
    versions = [[name, version] for name, version in report["versions"].items()]
    yield folded_table("Versions and machine", "Of the run.", ["What", "Value"], [*command, *data, *versions, *facts], text=2)
    if settings["notes"]:
        yield tag("details", tag("summary", "Remarks of the plan"), tag("ul", *(tag("li", note) for note in settings["notes"])))
    listed = [[f["name"], size_text(f["bytes"]), tag("code", f["sha256"] or "not computed: --report full")] for f in report["files"]]
    yield folded_table("Files", "SHA-256 of the files beside this one.", ["File", "Size", "SHA-256"], listed)
