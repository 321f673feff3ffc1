"""The Pareto curve of a selection as a picture: bits per weight against loss, as SVG."""

from __future__ import annotations

import math
from html import escape

from quark.selection.selection import SelectionResult

__all__ = ["curve_svg"]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 400, 70, 50, 40, 20
_PREDICTED, _MEASURED, _CHOSEN = "#3b82c4", "#d9822b", "#c8553d"
_SMALLEST = 1e-9  # losses of zero, of float layers, have no place on a logarithmic axis


def curve_svg(result: SelectionResult) -> str:
    """Return the curve as a picture: predicted losses as a line, measured divergences as dots, the choice as a ring.

    The axis of losses is logarithmic; a loss of 0 is not drawn.
    """
    problem, curve = result.problem, result.selection.curve
    points = [(problem.bits_of(p.group_bytes), p.loss, p.measured_kl) for p in curve]
    values = [v for _, loss, measured in points for v in (loss, measured or 0.0) if v > _SMALLEST] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    least, most = (points[0][0], points[-1][0]) if points else (0.0, 1.0)

    def x(bits: float) -> float:
        return LEFT + (bits - least) / max(most - least, 1e-12) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(max(loss, _SMALLEST)) - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    title = f"Loss against bits per weight: {', '.join(problem.candidates)}"
    parts = [_text(LEFT, 20, f"{title} ({result.selection.unit})", 13)]
    for power in range(low, high + 1):
        parts += [_line(LEFT, y(10**power), WIDTH - RIGHT, y(10**power)), _text(LEFT - 6, y(10**power) + 4, f"1e{power}", 11, "end")]
    for step in range(5):
        bits = least + (most - least) * step / 4
        parts.append(_text(x(bits), HEIGHT - BOTTOM + 18, f"{bits:.2f}", 11, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "bits per weight", 12, "middle"))
    drawn = [(x(bits), y(loss)) for bits, loss, _ in points if loss > _SMALLEST]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in drawn)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{_PREDICTED}" stroke-width="2"/>')
    parts += [_dot(x(bits), y(kl), 4, _MEASURED, "measured", kl) for bits, _, kl in points if kl is not None and kl > _SMALLEST]
    if result.loss:
        parts.append(_dot(x(result.bits), y(result.loss), 7, _CHOSEN, "chosen", result.loss, filled=False))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"'
    return f'{head} font-family="system-ui, sans-serif">{"".join(parts)}</svg>\n'


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" stroke-opacity="0.2"/>'


def _dot(x: float, y: float, radius: int, color: str, what: str, value: float, *, filled: bool = True) -> str:
    fill = color if filled else "none"
    circle = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{color}" stroke-width="2"'
    return f"<circle {circle}><title>{what}: {value:.4g}</title></circle>"
