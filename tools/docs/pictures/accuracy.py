"""The picture of accuracy over bits. Each scheme has a point for round-to-nearest, and some schemes have one
for calibration."""

from __future__ import annotations

import math

from tools.docs import measured
from tools.docs.pictures.svg import BLUE, GREEN, GREY, ORANGE, TEXT_WIDTH, Drawing

__all__ = ["accuracy_against_bits"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 56, 54
_SIZE = 11
_BELOW = 0.9
"""Start of the perplexity axis, as a multiple of the float model's perplexity."""
_ROUNDINGS = {"gptq": "GPTQ", "gptaq": "GPTAQ", "qronos": "Qronos"}
Rectangle = tuple[float, float, float, float]


def accuracy_against_bits() -> Drawing:
    """Draw the perplexity of SmolLM2-135M over bits per weight. Points that are lower or further left are
    better."""
    drawing = Drawing(900, 640)
    facts = measured.schemes()
    nearest = {name: value for name, value in measured.round_to_nearest()["perplexity"].items() if name in facts}
    reference = measured.round_to_nearest()["perplexity"]["float"]
    calibrated = {name: measured.calibrated().get(key, {}) for key, name in _ROUNDINGS.items()}
    best = {
        scheme: min((row[scheme]["perplexity"], name) for name, row in calibrated.items() if scheme in row)
        for scheme in calibrated["GPTQ"]
        if scheme in nearest
    }
    bits = {name: facts[name]["effective_bits"] for name in nearest}
    columns = sorted(set(bits.values()))
    top = max(nearest.values()) * 1.15

    def x_of(name: str) -> float:
        """Return the x coordinate of a scheme. The columns for numbers of bits are equally spaced, so that
        they do not overlap."""
        return _LEFT + (columns.index(bits[name]) + 0.35) * (drawing.width - _LEFT - _RIGHT) / len(columns)

    def y_of(perplexity: float) -> float:
        share = math.log(perplexity / (reference * _BELOW)) / math.log(top / (reference * _BELOW))
        return drawing.height - _BOTTOM - share * (drawing.height - _TOP - _BOTTOM)

    _axes(drawing, y_of, reference, top)
    for value in columns:
        name = next(name for name in bits if bits[name] == value)
        drawing.text(x_of(name), drawing.height - _BOTTOM + 22, f"{value:.4g}", 12, anchor="middle")
    taken = [(x_of(name) - 5, y_of(value) - 5, x_of(name) + 5, y_of(value) + 5) for name, value in nearest.items()]
    for name, (value, algorithm) in best.items():
        x, y = x_of(name), y_of(value)
        drawing.line(x, y_of(nearest[name]), x, y, GREEN, 1.2, 0.7)
        drawing.dot(x, y, 4, GREEN)
        taken.append((x - 5, y - 5, x + 5, y + 5))
        _label(drawing, taken, x, y, f"{name}, {algorithm}", GREEN)
    for name, value in sorted(nearest.items(), key=lambda item: item[1]):
        weight_only = facts[name]["input"] == "float"
        color = BLUE if weight_only else ORANGE
        drawing.dot(x_of(name), y_of(value), 4, color, filled=weight_only)
        _label(drawing, taken, x_of(name), y_of(value), name, color)
    return drawing


def _axes(drawing: Drawing, y_of, reference: float, top: float) -> None:  # type: ignore[no-untyped-def]
    right, bottom = drawing.width - _RIGHT, drawing.height - _BOTTOM
    legend = ((BLUE, True, "weights only"), (ORANGE, False, "weights and activations"), (GREEN, True, "best calibrated rounding"))
    for x, (color, filled, text) in zip((_LEFT, _LEFT + 130, _LEFT + 330), legend, strict=True):
        drawing.dot(x + 5, 20, 4, color, filled)
        drawing.text(x + 16, 24, text, 12)
    drawing.text(16, 46, "perplexity", 12, GREY)
    for value in (v for v in (30, 40, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000, 10000) if reference * _BELOW < v < top):
        drawing.line(_LEFT, y_of(value), right, y_of(value), opacity=0.12)
        drawing.text(_LEFT - 8, y_of(value) + 4, f"{value:,}", 12, anchor="end")
    drawing.line(_LEFT, y_of(reference), right, y_of(reference), GREY, 1.5)
    drawing.text(right, y_of(reference) + 15, f"float model, {reference:.2f}", 11, GREY, anchor="end")
    drawing.line(_LEFT, bottom, right, bottom, opacity=0.5)
    drawing.text((_LEFT + right) / 2, drawing.height - 8, "bits of a weight, its share of scales included", 12, GREY, anchor="middle")


def _label(drawing: Drawing, taken: list[Rectangle], x: float, y: float, text: str, color: str) -> None:
    """Write a label near a point, where the label covers nothing. If this place is far from the point, draw a
    line between them."""
    width = len(text) * _SIZE * TEXT_WIDTH
    for distance in range(0, 200, 6):
        for dy in (distance, -distance):
            for left in (x + 9, x - 9 - width):
                box = (left, y + dy - 7, left + width, y + dy + 5)
                inside = left >= _LEFT and left + width <= drawing.width and _TOP - 8 < y + dy < drawing.height - _BOTTOM - 6
                if inside and not any(_overlap(box, other) for other in taken):
                    taken.append(box)
                    if distance > 12:
                        drawing.line(x, y, left if left > x else left + width, y + dy - 1, color, 0.7, 0.5)
                    drawing.text(left, y + dy + 3, text, _SIZE, color)
                    return


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
