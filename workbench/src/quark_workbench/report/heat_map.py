"""Heat maps: of the signal-to-noise ratio of layers in each block, and of the number of tokens of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
from markupsafe import Markup

from quark_workbench.report.markup import figure, number, numbered, tag, text
from quark_workbench.report.units import decibel_text

__all__ = ["Cell", "expert_cells", "grid", "heat_map", "ratio_cells", "tokens_text"]

_STEPS = 9
_STRONG = 5
"""The first step whose cells are so dark (light, on a dark page) that their text needs the other colour."""
LEAST_RANGE = 12.0
"""dB. Layers normally differ by a few dB, which should not look like an alarm."""
CELL_HEIGHT = 26
_MOST_WITH_TEXT = 40


T = TypeVar("T")


@attrs.frozen
class Cell:
    """A cell of a heat map: the value that sets the colour, the text in the cell, and the tooltip."""

    value: float | None
    label: str
    title: str


Cells = Mapping[str, Sequence[Cell | None]]
"""Dictionary from name of row to cells of a heat map. An empty cell is None."""


def ratio_cells(layers: Sequence[Mapping[str, Any]], blocks: Sequence[str], key: str) -> dict[str, list[Cell | None]]:
    """Return a row of cells for each kind of layer. A cell has the kind's lowest ratio in a block.

    All experts of a block are of the same kind. ``key`` names the ratio.
    """
    of_kind: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for layer in layers:
        if layer["block"] is not None and layer.get(key) is not None:
            of_kind.setdefault(layer["kind"], {}).setdefault(layer["block"], []).append(layer)
    return {kind: [_worst(of_block.get(block, ()), key) for block in blocks] for kind, of_block in of_kind.items()}


def _worst(layers: Sequence[Mapping[str, Any]], key: str) -> Cell | None:
    """Return the cell of the layer with the lowest ratio, or None if there are no layers."""
    if not layers:
        return None
    worst = min(layers, key=lambda layer: layer[key])
    many = f", the lowest of {len(layers)}" if len(layers) > 1 else ""
    return Cell(worst[key], f"{worst[key]:.1f}", f"{worst['name']}: {decibel_text(worst[key])}{many}")


def expert_cells(tokens: Mapping[str, int]) -> dict[str, list[Cell | None]]:
    """Return a row of cells for each mixture-of-experts layer, with a cell for each expert.

    ``tokens`` is a dictionary from full name of layer to the number of tokens that reached the layer. The
    last number in a name is the number of the expert. If an expert has several layers, its cell has the
    lowest number of tokens.
    """
    fewest: dict[str, dict[int, int]] = {}
    for name, count in tokens.items():
        parts = name.split(".")
        place = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
        if place is not None:
            experts = fewest.setdefault(".".join(parts[:place]), {})
            expert = int(parts[place])
            experts[expert] = min(count, experts.get(expert, count))
    rows: dict[str, list[Cell | None]] = {}
    for mixture, experts in fewest.items():
        least = [experts.get(i) for i in range(max(experts) + 1)]
        rows[mixture] = [None if n is None else Cell(math.log2(n + 1), _short(n), f"{i}: {n:,} tokens") for i, n in enumerate(least)]
    return rows


def heat_map(
    name: str, title: str, description: str, rows: Cells, unit: Callable[[float], str], axis: str, least_range: float = LEAST_RANGE
) -> Markup:
    """Return a heat map.

    Args:
        name: Id of the plot.
        title: Title of the plot.
        description: Description of the plot for screen readers.
        rows: The rows of cells. The lowest value has the strongest colour.
        unit: Function that returns the text of a value for the legend.
        axis: Label of the axis of columns.
        least_range: Smallest allowed difference between the ends of the colour scale. Without such a limit,
            small differences would get very different colours.
    """
    values = [cell.value for cells in rows.values() for cell in cells if cell is not None and cell.value is not None]
    high = sorted(values)[int(0.9 * (len(values) - 1))]  # a few layers with little error must not make all others look bad
    low = min(*values, high - least_range)
    columns = max(len(cells) for cells in rows.values())

    def draw(cell: Cell | None, x: float, y: float, width: float) -> list[Markup]:
        gap = 1.5 if width > 12 else 0.3
        box = {"x": float(x), "y": float(y), "width": float(width - gap), "height": float(CELL_HEIGHT), "rx": 3 if width > 12 else 0}
        if cell is None or cell.value is None:
            return [tag("rect", class_="hn", **box)]
        step = _step(cell.value, low, high)
        rectangle = tag("rect", tag("title", cell.title), class_=f"h{step}", **box)
        if columns > _MOST_WITH_TEXT or len(cell.label) * 6.3 > width:
            return [rectangle]
        return [rectangle, text(x + (width - gap) / 2, y + 17, cell.label, "cell strong" if step >= _STRONG else "cell")]

    drawn, left, right, below = grid(rows, columns, axis, draw)
    drawn += _legend(left, below + 46, unit(low), unit(high))
    return figure(name, title, description, right, below + 66, *drawn)


def grid(
    rows: Mapping[str, Sequence[T]], columns: int, axis: str, draw: Callable[[T, float, float, float], Sequence[Markup]]
) -> tuple[list[Markup], float, float, float]:
    """Draw cells in rows, with the names of the rows and the numbers of the columns.

    Args:
        rows: Dictionary from name of row to cells.
        columns: The number of columns.
        axis: Label of the axis of columns.
        draw: Function that draws a cell. It takes the cell, the left and the upper edge of its place, and the
            width of a column.

    Returns:
        The drawing, the left edge of the cells, the right edge of the plot, and the lower edge of the cells.
    """
    left = 10 + 6.7 * max((len(row) for row in rows), default=0)
    width = max(4.0, min(30.0, 860 / max(columns, 1)))
    drawn: list[Markup] = []
    for i, (row, cells) in enumerate(rows.items()):
        y = float(i * (CELL_HEIGHT + 2))
        drawn.append(text(left - 10, y + 17, row, "name", "end"))
        for j, cell in enumerate(cells):
            drawn += draw(cell, left + j * width, y, width)
    below = float(len(rows) * (CELL_HEIGHT + 2))
    drawn += numbered(columns, lambda j: left + (j + 0.5) * width, below + 14)
    drawn.append(text(left, below + 32, axis))
    return drawn, left, max(left + columns * width + 4, left + 330), below


def _step(value: float, low: float, high: float) -> int:
    """Return the number of the colour of a value. The highest value has the colour 0."""
    return max(0, min(_STEPS - 1, int(_STEPS * (high - value) / (high - low)))) if high > low else 1


def _legend(x: float, y: float, lowest: str, highest: str) -> list[Markup]:
    """Return the scale of colours, with a text at each end."""
    start = x + 6.4 * len(highest) + 8
    boxes = [tag("rect", x=number(start + 18 * i), y=number(y), width=18, height=12, class_=f"h{i}") for i in range(_STEPS)]
    return [text(x, y + 10, highest), *boxes, text(start + 18 * _STEPS + 8, y + 10, lowest)]


def tokens_text(log2: float) -> str:
    """Return a number of tokens as text. ``log2`` is the value of a cell of `expert_cells`."""
    return f"{max(2**log2 - 1, 0):,.0f} tokens"


def _short(count: int) -> str:
    return f"{count}" if count < 1000 else f"{count / 1000:.0f}k"
