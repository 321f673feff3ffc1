"""Plots of a selection: predicted loss over size, measured over predicted loss, and the chosen schemes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from quark.base.names import without_numbers
from quark_workbench.report.heat_map import CELL_HEIGHT, grid
from quark_workbench.report.markup import dot, figure, level, nice_ticks, number, path, picture, tag, text
from quark_workbench.report.units import size_text

__all__ = [
    "additivity",
    "candidates_in_order",
    "choice_map",
    "chosen_point",
    "color_of",
    "curve_svg",
    "layers_by_candidate",
    "measured_by_predicted",
    "pareto_curve",
]

Selection = Mapping[str, Any]
"""A selection as JSON values: `quark_workbench.mixed_precision.SelectionResult.to_dict`."""

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 1000, 320, 66, 44, 26, 20
_SIDE = 380
_SMALLEST = 1e-9
"""Smaller losses, such as 0 for float layers, do not fit on a logarithmic axis."""


def chosen_point(selection: Selection) -> Mapping[str, Any] | None:
    """Return the chosen point of the curve, or None if the selection has no curve."""
    return next((point for point in selection["curve"] if point["total_bytes"] == selection["total_bytes"]), None)


def candidates_in_order(selection: Selection) -> list[str]:
    """Return the names of the candidates. The candidate with the fewest bytes comes first."""
    sizes = [row for row in selection["sizes"].values() if len(row) == len(selection["candidates"])] or list(selection["sizes"].values())
    return sorted(selection["candidates"], key=lambda name: sum(row.get(name, 0) for row in sizes))


def layers_by_candidate(selection: Selection) -> list[tuple[str, list[str], int]]:
    """Return a tuple for each candidate: its name, the layers that get it, and the bytes of these layers."""
    rows = []
    for name in candidates_in_order(selection):
        groups = [group for group, chosen in selection["choices"].items() if chosen == name]
        layers = [layer for group in groups for layer in selection["layers"][group]]
        rows.append((name, layers, sum(selection["sizes"][group][name] for group in groups)))
    return rows


def measured_by_predicted(selection: Selection) -> list[float]:
    """Return the ratio of measured to predicted divergence for each point at which both are known in nats."""
    if not str(selection["unit"]).startswith("nats"):
        return []
    return [p["measured_kl"] / p["loss"] for p in selection["curve"] if p["measured_kl"] and p["loss"] > 0]


def pareto_curve(selection: Selection) -> Markup:
    """Return a plot of the predicted loss over the size, with measured divergences and the chosen point."""
    return figure(*_curve_plot(selection), least=620)


def curve_svg(selection: Selection) -> str:
    """Return an SVG file of the curve. Losses are a line, measurements dots, and the chosen point a ring."""
    return picture(*_curve_plot(selection))


def _curve_plot(selection: Selection) -> tuple[Any, ...]:
    """Return the arguments of `markup.drawing` for the curve.

    The axis of losses is logarithmic. A point with the loss 0 is not drawn.
    """
    curve = [point for point in selection["curve"] if point["loss"] > _SMALLEST]
    values = [v for p in curve for v in (p["loss"], p["measured_kl"] or 0.0) if v > _SMALLEST]
    low, high = _powers(values)
    sizes = [point["total_bytes"] / 1e6 for point in (*curve, selection)]
    ticks = nice_ticks(min(sizes), max(sizes), 8)

    def x(size: float) -> float:
        return _LEFT + (size / 1e6 - ticks[0]) / ((ticks[-1] - ticks[0]) or 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _TOP + (high - math.log10(loss)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    drawn: list[str] = []
    for power in range(low, high + 1):
        drawn += level(y(10**power), _LEFT, _WIDTH - _RIGHT, _power(power))
    drawn += [text(x(1e6 * tick), _HEIGHT - _BOTTOM + 16, number(tick), anchor="middle") for tick in ticks]
    drawn.append(path([(x(p["total_bytes"]), y(p["loss"])) for p in curve], "line"))
    for point in curve:
        said = f"{size_text(point['total_bytes'])}, {point['bits']:.2f} bits: predicted {point['loss']:.4g}"
        drawn.append(dot(x(point["total_bytes"]), y(point["loss"]), 3, "dot", said))
        if (point["measured_kl"] or 0.0) > _SMALLEST:
            said = f"{size_text(point['total_bytes'])}: measured {point['measured_kl']:.4g} nats per token"
            drawn.append(dot(x(point["total_bytes"]), y(point["measured_kl"]), 5, "dot measured", said))
    if (selection["loss"] or 0.0) > _SMALLEST:
        said = f"chosen: {size_text(selection['total_bytes'])}, {selection['bits']:.2f} bits, predicted {selection['loss']:.4g}"
        drawn.append(dot(x(selection["total_bytes"]), y(selection["loss"]), 9, "ring", said))
    drawn += [text(4, 10, str(selection["unit"])), text(_LEFT, _HEIGHT - 8, "MB of all tensors")]
    said = f"{len(curve)} sizes from {size_text(1e6 * min(sizes))} to {size_text(1e6 * max(sizes))}; the ring is the choice."
    return ("plot-pareto", f"Loss against size: {', '.join(selection['candidates'])}", said, _WIDTH, _HEIGHT, *drawn)


def additivity(selection: Selection) -> Markup:
    """Return a plot of measured divergences over predicted losses. On the dashed line, both are equal."""
    points = [p for p in selection["curve"] if (p["measured_kl"] or 0.0) > _SMALLEST and p["loss"] > _SMALLEST]
    low, high = _powers([v for p in points for v in (p["loss"], p["measured_kl"])])
    scale = (_SIDE - _LEFT - _RIGHT) / (high - low)

    def at(predicted: float, measured: float) -> tuple[float, float]:
        return _LEFT + (math.log10(predicted) - low) * scale, _TOP + (high - math.log10(measured)) * scale

    drawn: list[str] = []
    for power in range(low, high + 1):
        value = 10.0**power
        drawn += [path([at(10.0**low, value), at(10.0**high, value)], "grid"), path([at(value, 10.0**low), at(value, 10.0**high)], "grid")]
        x, y = at(value, value)
        drawn.append(text(_LEFT - 8, y + 4, _power(power), anchor="end"))
        drawn.append(text(x, _TOP + (high - low) * scale + 16, _power(power), anchor="middle"))
    drawn.append(path([at(10.0**low, 10.0**low), at(10.0**high, 10.0**high)], "limit"))
    for point in points:
        said = f"{point['bits']:.2f} bits: predicted {point['loss']:.4g}, measured {point['measured_kl']:.4g}"
        drawn.append(dot(*at(point["loss"], point["measured_kl"]), 5, "dot measured", said))
    own = chosen_point(selection)
    if own is not None and own in points:
        drawn.append(dot(*at(own["loss"], own["measured_kl"]), 9, "ring"))
    bottom = _TOP + (high - low) * scale + 34
    drawn += [text(4, 10, "measured"), text(_LEFT, bottom, "predicted, nats per token")]
    title = "Measured against predicted divergence"
    said = "On the dashed line, measured and predicted divergence agree; above it, errors of groups amplify each other."
    return figure("plot-additivity", title, said, _SIDE, bottom + 6, *drawn, least=300)


def choice_map(selection: Selection, blocks: Sequence[str]) -> Markup:
    """Return a map of the chosen candidates. Each kind of group is a row, and each block is a column."""
    order = candidates_in_order(selection)
    rows: dict[str, list[str | None]] = {}
    for group in selection["choices"]:
        block = next((i for i, name in enumerate(blocks) if group == name or group.startswith(f"{name}.")), None)
        if block is not None:
            kind = without_numbers(group.removeprefix(blocks[block]).lstrip(".")) or "whole block"
            rows.setdefault(kind, [None] * len(blocks))[block] = group

    def draw(group: str | None, x: float, y: float, width: float) -> list[Markup]:
        if group is None:
            return []
        chosen, losses = selection["choices"][group], selection["losses"].get(group, {})
        predicted = f", predicted loss {losses[chosen]:.3g}" if chosen in losses else ""
        hint = tag("title", f"{group}: {chosen}, {size_text(selection['sizes'][group][chosen])}{predicted}")
        box = {"width": width - (1.5 if width > 12 else 0.3), "height": float(CELL_HEIGHT)}
        return [tag("rect", hint, class_=color_of(chosen, order), x=x, y=y, **box)]

    drawn, _, right, below = grid(rows, len(blocks), "block", draw)
    said = "Rows are kinds of groups, columns are blocks; the darker a cell, the fewer bits."
    return figure("plot-choices", "Scheme of each group of layers", said, right, below + 38, *drawn)


def color_of(candidate: str, order: Sequence[str]) -> str:
    """Return the CSS class of a candidate's colour. The candidate with the fewest bytes is the darkest."""
    place = order.index(candidate)
    return f"h{round(7 - 6 * place / max(len(order) - 1, 1))}"


def _powers(values: Sequence[float]) -> tuple[int, int]:
    """Return the exponents of the powers of ten that enclose some positive values."""
    low, high = (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))) if values else (0, 1)
    return low, max(high, low + 1)


def _power(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 3 else f"1e{power}"
