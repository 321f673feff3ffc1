"""Plots of lines and bars: errors after each block, gains of an algorithm, histograms, sizes, and times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from markupsafe import Markup

from quark.calibration.phases import PHASES
from quark_workbench.report.flags import DEPTH_AMBER, DEPTH_RED
from quark_workbench.report.markup import dot, figure, level, nice_ticks, number, numbered, path, tag, text
from quark_workbench.report.units import decibel_text, seconds_text, size_text

__all__ = [
    "block_errors",
    "depth_curve",
    "gains",
    "gains_by_kind",
    "histogram_plot",
    "histograms_of",
    "size_bars",
    "time_by_block",
    "used_phases",
]

_WIDTH, _HEIGHT = 1000, 260
_LEFT, _BOTTOM = 56, 34


def depth_curve(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a plot of the signal-to-noise ratio of the hidden states after each block."""
    values = [row["snr_db"] for row in rows]
    title = "Signal-to-noise ratio of the hidden states after each block"
    known = [v for v in values if v is not None]
    said = f"From {decibel_text(known[0])} after the first block to {decibel_text(known[-1])} after the last." if known else ""
    names = [str(row["block"]) for row in rows]
    return _lines("plot-depth", title, said, {"hidden states": values}, names, {"amber": DEPTH_AMBER, "red": DEPTH_RED})


def block_errors(name: str, changes: str, rounded: str, rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a plot of the signal-to-noise ratio of each block's output before and after a change.

    Args:
        name: Id of the plot.
        changes: What changes the blocks, such as "transforms".
        rounded: The words for how weights are rounded in both cases, such as "rounded to nearest".
        rows: A dictionary for each block, with both ratios.
    """
    pair = {"after": [r["snr_after_db"] for r in rows], "before": [r["snr_before_db"] for r in rows]}
    title = f"Signal-to-noise ratio of each block's output before and after {changes}"
    said = f"Each block is {rounded}, and its output on held-out tokens is compared with the float block's output."
    return _lines(name, title, said, pair, [str(r["name"]) for r in rows])


def _lines(
    name: str,
    title: str,
    said: str,
    lines: Mapping[str, Sequence[float | None]],
    places: Sequence[str],
    limits: Mapping[str, float] = MappingProxyType({}),
) -> Markup:
    """Return a plot of lines over the blocks, with values in dB.

    The area below the first line is filled. ``lines`` is a dictionary from label to values, and None stands
    for a missing value. ``limits`` is a dictionary from colour to a value in dB. A limit is drawn unless it
    is far below the lines.
    """
    values = [v for line in lines.values() for v in line if v is not None]
    near = {colour: limit for colour, limit in limits.items() if limit > min(values) - 6}
    ticks = nice_ticks(min([*values, *near.values(), 0.0 if min(values) < 12 else min(values) - 2]), max(values) + 1)
    low, high = ticks[0], ticks[-1]
    step = (_WIDTH - _LEFT - 20) / max(len(places) - 1, 1)

    def at(i: int, value: float) -> tuple[float, float]:
        return _LEFT + i * step, 12 + (_HEIGHT - 12 - _BOTTOM) * (high - value) / (high - low)

    drawn: list[str] = []
    for tick in ticks:
        drawn += level(at(0, tick)[1], _LEFT, _WIDTH - 16, number(tick))
    for colour, limit in near.items():
        y = at(0, limit)[1]
        drawn.append(path([(_LEFT, y), (_WIDTH - 16, y)], f"limit {colour}"))
        drawn.append(text(_WIDTH - 18, y - 5, f"{colour} below {limit:g} dB", colour, "end"))
    for number_of_line, (label, line) in enumerate(lines.items()):
        points = [at(i, v) for i, v in enumerate(line) if v is not None]
        if number_of_line == 0 and points:
            floor = at(0, low)[1]
            drawn.append(path([(points[0][0], floor), *points, (points[-1][0], floor)], "area", closed=True))
        drawn.append(path(points, "line" if number_of_line == 0 else "line second"))
        for i, value in enumerate(line):
            if value is not None and (number_of_line == 0 or len(places) <= 80):
                x, y = at(i, value)
                class_ = "dot" if number_of_line == 0 else "dot before"
                drawn.append(dot(x, y, 3.6, class_, f"{places[i]}, {label}: {decibel_text(value)}"))
    drawn += numbered(len(places), lambda i: at(i, low)[0], _HEIGHT - 14)
    drawn += [text(4, 10, "dB"), text(_LEFT, _HEIGHT + 4, "block")]
    return figure(name, title, said, _WIDTH, _HEIGHT + 8, *drawn, least=620)


def gains_by_kind(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float, int]]:
    """Return the rows for `gains`: for each kind of layer, the median ratios and the number of layers.

    Layers whose outputs were not compared are left out.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for layer in layers:
        if layer.get("output_snr_db") is not None and layer.get("nearest_snr_db") is not None:
            pairs.setdefault(layer["kind"], []).append((layer["nearest_snr_db"], layer["output_snr_db"]))
    return [(kind, statistics.median(a for a, _ in both), statistics.median(b for _, b in both), len(both)) for kind, both in pairs.items()]


def gains(rows: Sequence[tuple[str, float, float, int]]) -> Markup:
    """Return a plot of two signal-to-noise ratios of outputs for each kind of layer.

    One ratio is for weights that are rounded to nearest, and the other for weights that the algorithm rounds.
    A line joins both.

    Args:
        rows: A tuple for each kind: its name, the ratio for rounding to nearest in dB, the ratio for the
            algorithm in dB, and the number of layers.
    """
    left, width = 10 + 6.9 * max(len(kind) for kind, *_ in rows), 1000
    ticks = nice_ticks(min(min(a, b) for _, a, b, _ in rows) - 0.5, max(max(a, b) for _, a, b, _ in rows) + 0.5)
    scale = (width - left - 90) / (ticks[-1] - ticks[0])
    below = 30 * len(rows) + 6
    drawn: list[str] = []
    for tick in ticks:
        x = left + (tick - ticks[0]) * scale
        drawn += [path([(x, 0), (x, below)], "grid"), text(x, below + 15, number(tick), anchor="middle")]
    for i, (kind, before, after, count) in enumerate(rows):
        y = 18 + 30 * i
        first, second = (left + (v - ticks[0]) * scale for v in (before, after))
        said = f"{kind}, {count} layers: {decibel_text(before)} to nearest, {decibel_text(after)} in the result"
        drawn += [
            text(left - 12, y + 4, kind, "name", "end"),
            tag("line", x1=first, y1=float(y), x2=second, y2=float(y), class_="gain" if after >= before else "gain loss"),
            dot(first, y, 5, "dot before", said),
            dot(second, y, 5, "dot after", said),
            text(max(first, second) + 10, y + 4, f"{after - before:+.1f} dB", "value"),
        ]
    drawn.append(text(left, below + 32, "dB, median of the layers of a kind"))
    said = "Medians over the layers of each kind, on held-out tokens."
    return figure("plot-gain", "Outputs rounded to nearest and by the algorithm", said, width, below + 38, *drawn, least=620)


def histograms_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a dictionary for each histogram of a report.

    It has the layer with its number and signal-to-noise ratio, the tensor (``weight`` or ``input``), and the
    counts.
    """
    ratio = {layer["name"]: layer["snr_db"] for layer in report["layers"]}
    return [
        {"layer": name, "number": number, "snr_db": ratio.get(name), "tensor": tensor, "counts": entry[tensor]}
        for number, entry in enumerate(report["histograms"])
        for name in [entry["layer"]]
        for tensor in ("weight", "input")
        if entry.get(tensor) is not None
    ]


def histogram_plot(name: str, title: str, histogram: Mapping[str, Any]) -> Markup:
    """Return a plot of a histogram. Counts of float values are an area, and those of rounded values are bars.

    The axis of counts is logarithmic.
    """
    width, height, left = 470.0, 190.0, 36.0
    floats, rounded = histogram["float"], histogram["rounded"]
    top = max(1.0, math.log10(max([*floats, *(rounded or [0])], default=1) + 1))
    step = (width - left - 6) / len(floats)
    floor = height - 24

    def up(count: int) -> float:
        return floor - (floor - 8) * math.log10(count + 1) / top

    area = [(left, floor)]
    for i, count in enumerate(floats):
        area += [(left + i * step, up(count)), (left + (i + 1) * step, up(count))]
    drawn: list[str] = []
    for power in range(int(top) + 1):
        y = up(10**power - 1 if power else 0)
        drawn += [path([(left, y), (width - 6, y)], "grid"), text(left - 6, y + 4, "0" if not power else _power(power), anchor="end")]
    drawn.append(path([*area, (left + len(floats) * step, floor)], "float-area", closed=True))
    thin = max(step * 0.5, 1.0)
    bars = "".join(
        f"M{number(left + (i + 0.5) * step - thin / 2)} {number(floor)}V{number(up(c))}h{number(thin)}V{number(floor)}Z"
        for i, c in enumerate(rounded or ())
        if c
    )
    if bars:
        drawn.append(tag("path", d=bars, class_="rounded-area"))
    ends = (histogram["low"], 0.0, histogram["high"]) if histogram["low"] < 0 < histogram["high"] else (histogram["low"], histogram["high"])
    span = histogram["high"] - histogram["low"]
    for value in ends:
        x = left + (width - left - 6) * (value - histogram["low"]) / span
        drawn.append(text(x, height - 8, f"{value:.3g}", anchor="middle" if value == 0 else "end" if value == ends[-1] else "start"))
    said = "Float values as an area, rounded values as bars; counts on a logarithmic axis."
    return figure(name, title, said, width, height, *drawn, least=0)


def _power(power: int) -> str:
    return {1: "10", 2: "100", 3: "1k", 4: "10k", 5: "100k", 6: "1M"}.get(power, f"1e{power}")


def size_bars(kinds: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a plot with two bars for each kind of layer: its bytes in float, and its bytes as stored."""
    left, width = 10 + 6.9 * max(len(k["kind"]) for k in kinds), 1000
    scale = (width - left - 170) / max(max(k["float_bytes"], k["stored_bytes"] or 0) for k in kinds)
    drawn: list[str] = []
    for i, kind in enumerate(kinds):
        y, stored, class_ = 34.0 * i, kind["stored_bytes"], "bar" if kind["quantized"] else "bar plain"
        said = f"{kind['kind']}: {size_text(kind['float_bytes'])} in float" + ("" if stored is None else f", {size_text(stored)} stored")
        end = left + scale * max(kind["float_bytes"], stored or 0)
        written = "" if stored is None else f"{size_text(stored)}, {kind['bits'] or 0:.2f} bits"
        drawn += [
            text(left - 12, y + 18, kind["kind"], "name", "end"),
            tag("rect", tag("title", said), x=left, y=y, width=scale * kind["float_bytes"], height=26, rx=4, class_="bar-float"),
            tag("rect", tag("title", said), x=left, y=y + 6, width=scale * (stored or 0), height=14, rx=3, class_=class_),
            text(end + 10, y + 18, written, "value"),
        ]
    said = "Pale bars are the float model, narrow ones the checkpoint."
    return figure("plot-sizes", "Bytes by kind of layer, float and stored", said, width, 34 * len(kinds), *drawn, least=620)


def used_phases(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the phases that took more than 1/10,000 of the time of all blocks."""
    spent = {phase: sum(row["seconds"].get(phase, 0.0) for row in rows) for phase in PHASES}
    return [phase for phase, seconds in spent.items() if seconds > 1e-4 * sum(spent.values())]


def time_by_block(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a plot of the seconds of each block, as a bar with a part for each phase."""
    totals = [sum(row["seconds"].values()) for row in rows]
    ticks = nice_ticks(0, max(totals), 4)
    step, floor = (_WIDTH - _LEFT - 20) / len(rows), _HEIGHT - _BOTTOM
    scale = (floor - 12) / ticks[-1]
    drawn: list[str] = []
    for tick in ticks:
        drawn += level(floor - tick * scale, _LEFT, _WIDTH - 16, number(tick))
    for i, (row, total) in enumerate(zip(rows, totals, strict=True)):
        y = float(floor)
        bars = []
        for phase in PHASES:
            height = row["seconds"].get(phase, 0.0) * scale
            y -= height
            if height > 0.05:
                bars.append(tag("rect", x=_LEFT + i * step + 1, y=y, width=max(step - 2, 0.6), height=height, class_=f"p-{phase}"))
        spent = ", ".join(f"{phase} {seconds_text(s)}" for phase, s in row["seconds"].items() if s > 0)
        drawn.append(tag("g", tag("title", f"{row['block']}: {seconds_text(total)} ({spent})"), *bars))
    every = max(1, math.ceil(len(rows) / 32))
    marks = [str(i) if i < len(rows) - 1 else "…" for i in range(0, len(rows), every)]
    drawn += [text(_LEFT + (i * every + 0.5) * step, floor + 16, mark, anchor="middle") for i, mark in enumerate(marks)]
    drawn += [text(4, 10, "s"), text(_LEFT, _HEIGHT + 4, "block; the last bar is the part outside the blocks")]
    said = "Stacked bars, in the order of the legend."
    return figure("plot-time", "Time of each block by phase", said, _WIDTH, _HEIGHT + 8, *drawn, least=620)
