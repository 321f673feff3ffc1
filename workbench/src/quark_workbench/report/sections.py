"""Sections of the page, in the order in which they are read: findings, layers, choice of schemes, sizes, time, settings and others."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from quark.base.names import folded
from quark.calibration.phases import PHASES
from quark_workbench.report.changes import transforms_section, tunings_section
from quark_workbench.report.flags import AMBER, RED
from quark_workbench.report.heat_map import expert_cells, heat_map, ratio_cells
from quark_workbench.report.markup import Markup, figure_text, folded_table, heading, legend_key, table, tag
from quark_workbench.report.plots import depth_curve, gains, histogram_plot, size_bars, time_by_block
from quark_workbench.report.selection import selection_section
from quark_workbench.report.units import amount, bits, decibel_text, plural, seconds_text, share, size_text

__all__ = ["big_numbers", "sections"]

Report = Mapping[str, Any]


def sections(report: Report) -> list[tuple[str, str, Markup]]:
    """Return the sections that a report has something for: id, title for the list of links, markup."""
    made = (
        ("flags", "Findings", _flags(report)),
        ("layers", "Layers", _layers(report)),
        ("selection", "Choice of schemes", selection_section(report)),
        ("gain", "Gain of the algorithm", _gain(report)),
        ("depth", "Depth", _depth(report)),
        ("transforms", "Transforms", transforms_section(report)),
        ("tunings", "Tuning", tunings_section(report)),
        ("worst", "Worst layers", _worst(report)),
        ("experts", "Experts", _experts(report)),
        ("sizes", "Sizes", _sizes(report)),
        ("time", "Time", _time(report)),
        ("settings", "Settings and files", _settings(report)),
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
    items = [_flag(flag) for flag in report["flags"]]
    if not items:
        sign = _sign("good")
        items = [
            tag(
                "li",
                sign,
                tag("p", "Nothing crosses a threshold.", class_="what"),
                tag("p", "Evaluate the model all the same."),
                class_="flag good",
            )
        ]
    rows = [[name.replace("_", " "), f"{value:g}"] for name, value in report["thresholds"].items()]
    lead = "What a threshold was crossed by, and what to do about it. Whether the model is good enough, quark evaluate tells."
    return [
        *heading("flags", "Findings", lead),
        tag("ul", *items, class_="flags"),
        folded_table("Thresholds", "When a finding is shown.", ["Threshold", "Value"], rows),
    ]


def _flag(flag: Mapping[str, Any]) -> Markup:
    names = flag["layers"]
    listed = None
    if names:
        shown = tag("p", tag("code", folded(names[:400], most=24)))
        listed = tag("details", tag("summary", f"Which: {plural(len(names), 'name')}"), shown)
    level = tag("span", f"{flag['level'].capitalize()}. ", class_="level")
    return tag(
        "li",
        _sign(flag["level"]),
        tag("p", level, flag["title"], class_="what"),
        tag("p", flag["advice"]),
        listed,
        class_=f"flag {flag['level']}",
    )


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


def _layers(report: Report) -> list[Markup]:
    layers, blocks = report["layers"], report["model"]["blocks"]
    content: list[Markup] = []
    for key, name, what in (("snr_db", "weights", "weights"), ("output_snr_db", "outputs", "outputs on held-out tokens")):
        cells = ratio_cells(layers, blocks, key)
        if cells:
            title = f"Signal-to-noise ratio of the {what}, in dB"
            said = "Rows are kinds of layers, columns are blocks; a darker cell has a larger error."
            content += [tag("h3", title), heat_map(f"plot-{name}", title, said, cells, decibel_text, "block")]
    if not layers:
        return []
    if not content:
        content = [tag("p", "No ratio is known. quark report OUT --float MODEL measures the weights against the float checkpoint.")]
    lead = (
        "10 log10 of the energy of the weights (or outputs) ÷ that of their rounding error: 20 dB is a hundredth of error, 10 dB a tenth."
    )
    return [*heading("layers", "Error of each layer", lead), *content, _layer_table(report)]


def _layer_table(report: Report) -> Markup:
    order = sorted(report["layers"], key=lambda layer: (layer["snr_db"] is None, layer["snr_db"] or 0.0))
    heads = [
        "Layer",
        "Quantized to",
        "Bits",
        "Weights dB",
        "Outputs dB",
        "To nearest dB",
        "Peak ÷ RMS",
        "Scale ratio",
        "Tokens",
        "Damping",
        "Dead",
        "Remark",
    ]
    rows = [
        [
            layer["name"],
            layer["quantized_to"] + (f", by {layer['algorithm']}" if layer["algorithm"] else ""),
            figure_text(layer["bits"], ".2f"),
            *(figure_text(layer.get(key), ".1f") for key in ("snr_db", "output_snr_db", "nearest_snr_db", "peak_to_rms", "scale_ratio")),
            *(figure_text(layer.get(key), form) for key, form in (("tokens", ",d"), ("damping", ".3g"), ("dead", "d"))),
            layer.get("to_nearest_because") or "",
        ]
        for layer in order
    ]
    return folded_table("Table of all layers", "Layers, the lowest ratio of weights first.", heads, rows, text=2)


def _gain(report: Report) -> list[Markup]:
    pairs: dict[str, list[tuple[float, float]]] = {}
    for layer in report["layers"]:
        if layer.get("output_snr_db") is not None and layer.get("nearest_snr_db") is not None:
            pairs.setdefault(layer["kind"], []).append((layer["nearest_snr_db"], layer["output_snr_db"]))
    if not pairs:
        return []
    rows = [(kind, statistics.median(a for a, _ in both), statistics.median(b for _, b in both), len(both)) for kind, both in pairs.items()]
    cells = [[kind, str(count), f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}"] for kind, before, after, count in rows]
    heads = ["Kind of layer", "Layers", "To nearest dB", "Algorithm dB", "Gain dB"]
    legend = tag(
        "ul",
        legend_key("dot before", "rounded to nearest", round_=True),
        legend_key("dot after", "in the result", round_=True),
        class_="legend",
    )
    lead = "Outputs on tokens that the algorithm has not seen, with weights rounded to nearest and as they are in the result."
    plot = gains(rows)
    return [
        *heading("gain", "What the algorithm gains", lead),
        legend,
        plot,
        folded_table("Table of gains", "Medians by kind of layer.", heads, cells),
    ]


def _depth(report: Report) -> list[Markup]:
    rows = [row for row in report["depth"]["blocks"] if row["snr_db"] is not None]
    lead = (
        "The residual stream of the quantized model against that of the float model, on the same tokens. Errors of early blocks stay in it."
    )
    head = heading("depth", "Error through depth", lead)
    if not rows:
        how = (
            report["depth"].get("reason")
            or "It was not measured. quark report OUT --float MODEL --calib TEXT measures it on a few samples."
        )
        return [*head, tag("p", how)]
    cells = [[row["block"], f"{row['snr_db']:.2f}", f"{row['relative_error']:.3g}", f"{row['tokens']:,}"] for row in rows]
    heads = ["Block", "Ratio dB", "Relative squared error", "Tokens"]
    return [*head, depth_curve(rows), folded_table("Table of blocks", "Hidden states after each block.", heads, cells)]


def _worst(report: Report) -> list[Markup]:
    if not report["histograms"]:
        return []
    ratio = {layer["name"]: layer["snr_db"] for layer in report["layers"]}
    plots = []
    for i, entry in enumerate(report["histograms"]):
        for what in ("weight", "input"):
            if entry.get(what) is not None:
                of = f"{what} of {entry['layer']}"
                note = f"{decibel_text(ratio.get(entry['layer']))}" if what == "weight" else "values that the layer reads"
                plot = histogram_plot(f"plot-{what}-{i}", of.capitalize(), entry[what])
                plots.append(tag("div", tag("h3", entry["layer"]), tag("p", f"{what}, {note}", class_="note"), plot))
    legend = tag("ul", legend_key("float-area", "float"), legend_key("rounded-area", "rounded"), class_="legend")
    lead = "Values of the layers with the lowest ratio, on a logarithmic axis: long tails cost the values in the middle their precision."
    rows = [
        [
            e["layer"],
            what,
            f"{e[what]['low']:.4g}",
            f"{e[what]['high']:.4g}",
            f"{sum(e[what]['float']):,}",
            str(sum(c > 0 for c in e[what]["rounded"] or ())),
        ]
        for e in report["histograms"]
        for what in ("weight", "input")
        if e.get(what) is not None
    ]
    heads = ["Layer", "Tensor", "Lowest", "Highest", "Values", "Bins in use"]
    listed = folded_table("Table of ranges", "Ranges of the histograms; counts are in quark_report.json.", heads, rows, text=2)
    return [*heading("worst", "Worst layers", lead), legend, tag("div", *plots, class_="multiples"), listed]


def _experts(report: Report) -> list[Markup]:
    tokens = report["experts"]["tokens"]
    cells = expert_cells(tokens)
    if not cells:
        return []
    title = "Calibration tokens of each expert"
    lead = f"From {min(tokens.values()):,} to {max(tokens.values()):,} tokens. An expert that few tokens reach is rounded for those few."
    plot = heat_map("plot-experts", title, "Rows are mixtures, columns are experts.", cells, _tokens, "expert", least_range=2)
    rows = [[name, f"{count:,}"] for name, count in sorted(tokens.items(), key=lambda item: item[1])]
    return [*heading("experts", "Experts", lead), plot, folded_table("Table of experts", "Fewest tokens first.", ["Layer", "Tokens"], rows)]


def _tokens(log2: float) -> str:
    """Return the tokens of a colour of `expert_cells`."""
    return f"{max(2**log2 - 1, 0):,.0f} tokens"


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
    legend = tag(
        "ul",
        legend_key("bar-float", "float model"),
        legend_key("bar", "stored, quantized"),
        legend_key("bar plain", "stored, not quantized"),
        class_="legend",
    )
    heads = ["Kind of layer", "Layers", "Weights", "Float", "Stored", "Bits"]
    lead = f"Bytes of the tensors, scales and zero points included.{total}"
    return [*heading("sizes", "Sizes", lead), legend, size_bars(kinds), folded_table("Table of sizes", "By kind of layer.", heads, rows)]


def _time(report: Report) -> list[Markup]:
    time = report["time"]
    rows = [row for row in time["blocks"] if row["seconds"]]
    if not rows:
        return []
    spent = {phase: sum(row["seconds"].get(phase, 0.0) for row in rows) for phase in PHASES}
    used = [phase for phase, seconds in spent.items() if seconds > 1e-4 * sum(spent.values())]
    legend = tag("ul", *(legend_key(f"p-{phase}", phase) for phase in used), class_="legend")
    cells = [[p["phase"], seconds_text(p["seconds"]), _moved(p), share(p["share_of_limit"])] for p in time["phases"] if p["phase"] in used]
    probe = report["machine"]["probe"]
    speeds = f" Its limits: {probe['copy_bytes_per_second'] / 1e9:.1f} GB/s copied, {probe['flops'] / 1e9:.0f} GFLOP/s." if probe else ""
    caption = f"Share of the limit: the least time for these bytes and operations on this machine ÷ the time spent.{speeds}"
    heads = ["Phase", "Time", "Counted work", "Share of the limit"]
    lead = f"{seconds_text(time['seconds'])} in all. " if time["seconds"] else ""
    blocks = [[row["block"], *(seconds_text(row["seconds"].get(p, 0.0)) for p in used)] for row in rows]
    return [
        *heading("time", "Time", f"{lead}Where the run spent it, block by block."),
        legend,
        time_by_block(rows),
        table(caption, heads, cells),
        folded_table("Table of blocks", "Time by block and phase.", ["Block", *used], blocks),
    ]


def _moved(phase: Mapping[str, Any]) -> str:
    parts = [size_text(phase["bytes"])] if phase["bytes"] else []
    return ", ".join([*parts, *([f"{phase['flops'] / 1e9:,.1f} GFLOP"] if phase["flops"] else [])]) or "–"


def _settings(report: Report) -> list[Markup]:
    return [
        *heading("settings", "Settings and files", "What was asked for, what it was made with, and what lies in the directory."),
        *_setting_tables(report),
    ]


def _setting_tables(report: Report) -> Iterator[Markup]:
    settings, machine = report["settings"], report["machine"]
    layers = [[row["layers"], row["quantized_to"], row["reason"], str(row["count"])] for row in settings["layers"]]
    yield folded_table("Plan", "What layers get, and which rule said so.", ["Layers", "Quantized to", "Rule", "Count"], layers, text=3)
    for algorithm in settings["algorithms"]:
        shown = [[str(key), json.dumps(value, ensure_ascii=False)] for key, value in algorithm.items() if key != "name"]
        yield folded_table(f"Algorithm {algorithm.get('name')}", "Its settings.", ["Setting", "Value"], shown, text=2)
    facts = [[str(key), str(value)] for key, value in machine.items() if key != "probe"]
    data = [
        ["calibration samples", f"{settings['calibration']['samples']:,}"],
        ["calibration tokens", f"{settings['calibration']['tokens']:,}"],
    ]
    command = [["command", settings["command"]]] if settings["command"] else []
    versions = [[name, version] for name, version in report["versions"].items()]
    yield folded_table("Versions and machine", "Of the run.", ["What", "Value"], [*command, *data, *versions, *facts], text=2)
    if settings["notes"]:
        yield tag("details", tag("summary", "Remarks of the plan"), tag("ul", *(tag("li", note) for note in settings["notes"])))
    listed = [[f["name"], size_text(f["bytes"]), tag("code", f["sha256"] or "not computed: --report full")] for f in report["files"]]
    yield folded_table("Files", "SHA-256 of the files beside this one.", ["File", "Size", "SHA-256"], listed)
