"""Sections of the page on errors: of layers, through depth, of changed blocks, of experts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from quark_workbench.report.heat_map import expert_cells, heat_map, ratio_cells
from quark_workbench.report.markup import Markup, figure_text, folded_table, heading, legend, legend_key, tag
from quark_workbench.report.plots import block_errors, depth_curve, gains, histogram_plot
from quark_workbench.report.units import decibel_text, share

__all__ = [
    "depth_section",
    "experts_section",
    "gain_section",
    "layers_section",
    "transforms_section",
    "tunings_section",
    "worst_section",
]

Report = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def layers_section(report: Report) -> list[Markup]:
    """Return the section on the error of each layer; empty where a run has none."""
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
    heads = ["Layer", "Quantized to", "Bits", "Weights dB", "Outputs dB", "To nearest dB"]
    heads += ["Peak ÷ RMS", "Scale ratio", "Tokens", "Damping", "Dead", "Remark"]
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


def gain_section(report: Report) -> list[Markup]:
    """Return the section on the gain over round-to-nearest; empty where it was not measured."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for layer in report["layers"]:
        if layer.get("output_snr_db") is not None and layer.get("nearest_snr_db") is not None:
            pairs.setdefault(layer["kind"], []).append((layer["nearest_snr_db"], layer["output_snr_db"]))
    if not pairs:
        return []
    rows = [(kind, statistics.median(a for a, _ in both), statistics.median(b for _, b in both), len(both)) for kind, both in pairs.items()]
    cells = [[kind, str(count), f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}"] for kind, before, after, count in rows]
    heads = ["Kind of layer", "Layers", "To nearest dB", "Algorithm dB", "Gain dB"]
    keys = legend(legend_key("dot before", "rounded to nearest", round_=True), legend_key("dot after", "in the result", round_=True))
    lead = "Outputs on tokens that the algorithm has not seen, with weights rounded to nearest and as they are in the result."
    plot = gains(rows)
    return [
        *heading("gain", "What the algorithm gains", lead),
        keys,
        plot,
        folded_table("Table of gains", "Medians by kind of layer.", heads, cells),
    ]


def depth_section(report: Report) -> list[Markup]:
    """Return the section on the hidden states of the quantized model against those of the float model."""
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


def transforms_section(report: Report) -> list[Markup]:
    """Return the contents of the section on transforms; empty where a run had none."""
    rows = report["transforms"]
    if not rows:
        return []
    lead = "Output error of each block, rounded to nearest, before and after the transforms; a transform that does not help is undone."
    blocks = [t for t in rows if not t["whole_model"]]
    cells = [[t["name"], *_before_and_after(t), str(t.get("reason") or "")] for t in rows]
    heads = ["Where", "Before", "After", "Applied", "Reason"]
    return [
        *heading("transforms", "Transforms", lead),
        *_plot("plot-transforms", "transforms", "rounded to nearest", blocks),
        folded_table("Table of transforms", "Output errors as ratios.", heads, cells),
    ]


def tunings_section(report: Report) -> list[Markup]:
    """Return the contents of the section on tunings; empty where a run had none."""
    rows = report.get("tunings", [])
    if not rows:
        return []
    lead = "Output error of each rounded block before and after it was tuned; where it did not fall, the block is as it was rounded."
    content = heading("tunings", "Tuning", lead)
    for number, tuning in enumerate(dict.fromkeys(t["algorithm"] for t in rows)):
        content += _plot(f"plot-tuning-{number}", tuning, "rounded as in the checkpoint", [t for t in rows if t["algorithm"] == tuning])
    cells = [[t["name"], *_before_and_after(t), t["algorithm"], _loss(t), share(t["codes"]) if "codes" in t else "–"] for t in rows]
    heads = ["Block", "Before", "After", "Kept", "Tuning", "Loss", "Codes"]
    return [*content, folded_table("Table of tunings", "Output errors as ratios; last loss ÷ first; share of codes changed.", heads, cells)]


def _before_and_after(row: Mapping[str, Any]) -> list[str]:
    return [decibel_text(row["snr_before_db"]), decibel_text(row["snr_after_db"]), "yes" if row.get("applied") else "no"]


def _loss(row: Mapping[str, Any]) -> str:
    """Return the last loss of a tuning ÷ its first; a dash where it reports none."""
    first, last = row.get("first_loss"), row.get("last_loss", row.get("best_loss"))
    return f"{last / first:.3f}" if first and last is not None else "–"


def _plot(name: str, changes: str, rounded: str, rows: Rows) -> list[Markup]:
    """Return a plot of more than one block whose errors are known, with its legend."""
    known = [row for row in rows if row["snr_before_db"] is not None and row["snr_after_db"] is not None]
    if len(known) < 2:
        return []
    return [legend(legend_key("p-solve", "after"), legend_key("p-report", "before")), block_errors(name, changes, rounded, known)]


def worst_section(report: Report) -> list[Markup]:
    """Return the section with histograms of the worst layers; empty where there are none."""
    if not report["histograms"]:
        return []
    ratio = {layer["name"]: layer["snr_db"] for layer in report["layers"]}
    plots, rows = [], []
    for i, entry in enumerate(report["histograms"]):
        for what in ("weight", "input"):
            if entry.get(what) is not None:
                of = f"{what} of {entry['layer']}"
                note = decibel_text(ratio.get(entry["layer"])) if what == "weight" else "values that the layer reads"
                plot = histogram_plot(f"plot-{what}-{i}", of.capitalize(), entry[what])
                plots.append(tag("div", tag("h3", entry["layer"]), tag("p", f"{what}, {note}", class_="note"), plot))
                counts, used = f"{sum(entry[what]['float']):,}", str(sum(c > 0 for c in entry[what]["rounded"] or ()))
                rows.append([entry["layer"], what, f"{entry[what]['low']:.4g}", f"{entry[what]['high']:.4g}", counts, used])
    keys = legend(legend_key("float-area", "float"), legend_key("rounded-area", "rounded"))
    lead = "Values of the layers with the lowest ratio, on a logarithmic axis: long tails cost the values in the middle their precision."
    heads = ["Layer", "Tensor", "Lowest", "Highest", "Values", "Bins in use"]
    listed = folded_table("Table of ranges", "Ranges of the histograms; counts are in quark_report.json.", heads, rows, text=2)
    return [*heading("worst", "Worst layers", lead), keys, tag("div", *plots, class_="multiples"), listed]


def experts_section(report: Report) -> list[Markup]:
    """Return the section on the calibration tokens of experts; empty without experts."""
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
