"""The section of the page on a selection of schemes: the curve, the choice on it, and its predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from quark.base.names import folded
from quark_workbench.report.markup import Markup, figure_text, folded_table, heading, legend, legend_key, table, tag
from quark_workbench.report.selection_plots import additivity, candidates_in_order, choice_map, chosen_point, color_of, pareto_curve
from quark_workbench.report.units import size_text

__all__ = ["selection_section"]

_NATS = "nats"


def selection_section(report: Mapping[str, Any]) -> list[Markup]:
    """Return the contents of the section; empty where no selection was made."""
    selection = report.get("selection")
    if not selection:
        return []
    content = heading("selection", "Choice of schemes", _lead(selection))
    if any(point["loss"] > 0 for point in selection["curve"]):
        keys = [legend_key("dot", "predicted", round_=True), legend_key("dot measured", "measured", round_=True)]
        content += [tag("h3", "Loss against size"), legend(*keys, legend_key("ring", "chosen", round_=True)), pareto_curve(selection)]
    content += _additivity(selection)
    order = candidates_in_order(selection)
    keys = [legend_key(color_of(name, order), name) for name in order]
    content += [
        tag("h3", "Which layers got what"),
        legend(*keys),
        choice_map(selection, report["model"]["blocks"]),
        _by_candidate(selection),
    ]
    if selection["notes"]:
        content.append(tag("ul", *(tag("li", note) for note in selection["notes"])))
    return [*content, *_tables(selection)]


def _lead(selection: Mapping[str, Any]) -> str:
    ((name, most),) = selection["budget"].items()
    budget = {"bits": f"{most:g} bits per weight", "size": size_text(most), "kl": f"a KL divergence of {most:g} nats per token"}[name]
    loss = "" if selection["loss"] is None else f", with a predicted loss of {selection['loss']:.4g} {selection['unit']}"
    own = chosen_point(selection)
    measured = (
        "" if own is None or own["measured_kl"] is None else f"; measured on calibration text: {own['measured_kl']:.4g} nats per token"
    )
    return (
        f"{selection['selector'] or 'A selector'} chose among {', '.join(selection['candidates'])} within {budget}: "
        f"{selection['bits']:.2f} bits per weight, {size_text(selection['total_bytes'])} in all{loss}{measured}."
    )


def _additivity(selection: Mapping[str, Any]) -> list[Markup]:
    """Return the comparison of predicted and measured divergences, where both are known in nats."""
    points = [p for p in selection["curve"] if p["measured_kl"] and p["loss"] > 0]
    if not points or not str(selection["unit"]).startswith(_NATS):
        return []
    ratios = [point["measured_kl"] / point["loss"] for point in points]
    said = (
        f"Losses of groups are predicted one by one and added up. Where the divergence was measured, it is {min(ratios):.3g} to "
        f"{max(ratios):.3g} times the predicted one: near 1, losses add up; far from it, trust the order of choices more than their losses."
    )
    return [tag("h3", "Do losses add up?"), tag("p", said), additivity(selection)]


def _by_candidate(selection: Mapping[str, Any]) -> Markup:
    rows = []
    for name in candidates_in_order(selection):
        groups = [group for group, chosen in selection["choices"].items() if chosen == name]
        layers = [layer for group in groups for layer in selection["layers"][group]]
        size = sum(selection["sizes"][group][name] for group in groups)
        rows.append([name, folded(layers, most=12) if layers else "no layer", str(len(layers)), size_text(size)])
    return table("Layers of each scheme.", ["Scheme", "Layers", "Count", "Size"], rows, text=2)


def _tables(selection: Mapping[str, Any]) -> list[Markup]:
    own = chosen_point(selection)
    points = [
        [
            size_text(p["total_bytes"]) + (" (chosen)" if p is own else ""),
            f"{p['bits']:.3f}",
            f"{p['loss']:.4g}",
            figure_text(p["measured_kl"], ".4g"),
            ", ".join(f"{name} {count}" for name, count in p["groups"].items()),
        ]
        for p in selection["curve"]
    ]
    heads = ["Size", "Bits", "Predicted", "Measured KL", "Groups"]
    tables = [folded_table("Table of the curve", "From the fewest bytes to the most.", heads, points)] if points else []
    names = candidates_in_order(selection)
    losses = [
        [group, chosen, *(figure_text(selection["losses"].get(group, {}).get(name), ".3g") for name in names)]
        for group, chosen in selection["choices"].items()
    ]
    counts = Counter(selection["choices"].values())
    caption = f"Predicted losses of each group in each scheme; chosen: {', '.join(f'{name} {counts[name]} times' for name in names)}."
    return [*tables, folded_table("Table of groups", caption, ["Group", "Chosen", *names], losses, text=2)]
