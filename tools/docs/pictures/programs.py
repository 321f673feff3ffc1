"""The picture that compares several programs: KL divergence over the time of quantization, with a point for
each run."""

from __future__ import annotations

import math

from benchmarks.peers import OURS
from tools.docs.peers import cost, measured
from tools.docs.pictures.svg import BLUE, GREEN, GREY, ORANGE, RED, Drawing

__all__ = ["kl_against_time"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 170, 40, 54
_COLORS = {OURS: GREEN, "AMD Quark": ORANGE, "llm-compressor": BLUE, "auto-round": RED}


def kl_against_time(model: str = "SmolLM2-135M", scheme: str = "int4_wo_64") -> Drawing:
    """Draw KL divergence over the time of quantization, on logarithmic axes.

    The unit of time is one forward pass of the float model.
    """
    drawing = Drawing(900, 280)
    rows = [row for row in measured() if (row["model"], row["scheme"]) == (model, scheme) and row["algorithm"] != "none"]
    fastest, slowest = (0.8 * min(map(cost, rows)), 1.2 * max(map(cost, rows)))
    lowest, highest = (bound(row["mean_kl"] for row in rows) * share for bound, share in ((min, 0.9), (max, 1.1)))

    def x_of(forwards: float) -> float:
        return _LEFT + math.log(forwards / fastest) / math.log(slowest / fastest) * (drawing.width - _LEFT - _RIGHT)

    def y_of(kl: float) -> float:
        return _TOP + math.log(highest / kl) / math.log(highest / lowest) * (drawing.height - _TOP - _BOTTOM)

    drawing.text(_LEFT, 24, "KL divergence from the float model, nats per token", 12, GREY)
    for kl in (0.15, 0.2, 0.3, 0.4, 0.5):
        drawing.line(_LEFT, y_of(kl), drawing.width - _RIGHT, y_of(kl), opacity=0.12)
        drawing.text(_LEFT - 8, y_of(kl) + 4, f"{kl:g}", 12, anchor="end")
    for forwards in (2, 5, 10, 20, 50, 100, 200):
        drawing.text(x_of(forwards), drawing.height - _BOTTOM + 22, f"{forwards}", 12, anchor="middle")
    middle = (_LEFT + drawing.width - _RIGHT) / 2
    drawing.text(middle, drawing.height - 8, "CPU time of quantization, in forwards of the float model", 12, GREY, anchor="middle")
    places = [(x_of(cost(row)), y_of(row["mean_kl"])) for row in rows]
    for row, (x, y) in zip(rows, places, strict=True):
        color, label = _COLORS[row["program"]], f"{row['program']}: {row['algorithm'].replace('+', ' + ')}"
        is_crowded = any(0 < other_x - x < 160 and abs(other_y - y) < 12 for other_x, other_y in places)
        drawing.dot(x, y, 5 if row["program"] == OURS else 4, color)
        side, anchor = (-9, "end") if is_crowded else (9, "start")
        drawing.text(x + side, y + 4, label, 12, color, anchor, bold=row["program"] == OURS)
    return drawing
