"""The picture of KL divergence over the number of calibration tokens. Each model and algorithm has a line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from benchmarks.pooling import pooled
from tools.docs.defaults import RESULTS
from tools.docs.pictures.svg import BLUE, GREEN, GREY, ORANGE, RED, Drawing

__all__ = ["accuracy_against_tokens"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 250, 40, 54
_SIZE = re.compile(r"(\d+)×(\d+)")
"""Name of a setting: sequences × tokens per sequence."""
_LINE_HEIGHT = 16
_COLORS = {"gptq": ORANGE, "awq+gptq": BLUE, "awq+gptq+tuning": GREEN}


class _Series(NamedTuple):
    """The line of one model and algorithm.

    A point is a number of tokens, and the KL divergence relative to the divergence with the fewest tokens:
    the geometric mean of the ratios over the evaluated sequences.
    """

    model: str
    algorithms: str
    points: tuple[tuple[int, float], ...]


def _measured() -> Iterator[_Series]:
    """Yield a series for each model and algorithm. All points of a series come from sequences of equal
    length.

    The picture omits comparisons with ``--blocks``.
    """
    found: dict[tuple[str, str], dict[int, float]] = {}
    for comparison in json.loads(RESULTS.read_text(encoding="utf-8"))["comparisons"]:
        sizes = {name: [int(number) for number in name.split("×")] for name in comparison["settings"] if _SIZE.fullmatch(name)}
        if len(sizes) < len(comparison["settings"]) or "blocks" in comparison:
            continue
        first = next(iter(sizes))
        algorithms = comparison["settings"][first].partition("=")[2].partition(":")[0]
        for model in dict.fromkeys(cell["model"] for cell in comparison["cells"]):
            cells = [cell for cell in comparison["cells"] if cell["model"] == model]
            points = {count * length: name for name, (count, length) in sizes.items() if length == sizes[first][1]}
            found.setdefault((model, algorithms), {}).update(
                (tokens, math.exp(pooled(cells, first, name).mean)) for tokens, name in points.items()
            )
    for (model, algorithms), by_tokens in found.items():
        yield _Series(model, algorithms, tuple(sorted(by_tokens.items())))


def accuracy_against_tokens() -> Drawing:
    """Draw KL divergence ÷ the divergence with the fewest tokens, over the number of calibration tokens, on
    logarithmic axes."""
    drawing = Drawing(900, 420)
    series = list(_measured())
    points = [point for one in series for point in one.points]
    fewest, most = (bound(tokens for tokens, _ in points) for bound in (min, max))
    lowest, highest = 0.99 * min(kl for _, kl in points), 1.01 * max(kl for _, kl in points)

    def x_of(tokens: int) -> float:
        return _LEFT + math.log(tokens / fewest) / math.log(most / fewest) * (drawing.width - _LEFT - _RIGHT)

    def y_of(kl: float) -> float:
        return _TOP + math.log(highest / kl) / math.log(highest / lowest) * (drawing.height - _TOP - _BOTTOM)

    drawing.text(_LEFT, 24, f"KL divergence ÷ that with {fewest:,} tokens", 12, GREY)
    for value in (v / 50 for v in range(1, 100) if lowest <= v / 50 <= highest):
        drawing.line(_LEFT, y_of(value), drawing.width - _RIGHT, y_of(value), opacity=0.12 if value != 1 else 0.5)
        drawing.text(_LEFT - 8, y_of(value) + 4, f"{value:.2f}", 12, anchor="end")
    for tokens in sorted({tokens for tokens, _ in points}):
        drawing.text(x_of(tokens), drawing.height - _BOTTOM + 22, f"{tokens:,}", 12, anchor="middle")
    drawing.text((_LEFT + drawing.width - _RIGHT) / 2, drawing.height - 8, "calibration tokens", 12, GREY, anchor="middle")
    label_y = 0.0
    for one in sorted(series, key=lambda one: -one.points[-1][1]):
        color, places = _COLORS.get(one.algorithms, RED), [(x_of(tokens), y_of(kl)) for tokens, kl in one.points]
        for (x1, y1), (x2, y2) in pairwise(places):
            drawing.line(x1, y1, x2, y2, color, 1.5)
        for x, y in places:
            drawing.dot(x, y, 3, color)
        end_x, end_y = places[-1]
        label_y = max(end_y, label_y + _LINE_HEIGHT)
        drawing.line(end_x, end_y, drawing.width - _RIGHT + 12, label_y, color, 0.7, 0.5)
        drawing.text(drawing.width - _RIGHT + 16, label_y + 4, f"{one.algorithms}, {one.model}", 12, color)
    return drawing
