"""Draw lines, boxes and texts as SVG.

Neutral parts have the colour of the text around the picture, which may be light or dark.
"""

from __future__ import annotations

from html import escape

import attrs

__all__ = ["BLUE", "GREEN", "GREY", "ORANGE", "RED", "TEXT_WIDTH", "Drawing"]

# These colours are readable on white and on dark pages, and colour-blind people can tell them apart.
BLUE, ORANGE, GREEN, RED, GREY = "#3b82c4", "#d9822b", "#2a9d8f", "#c8553d", "#8a8f98"
TEXT_WIDTH = 0.6
"""Mean width of a character ÷ size of the text."""


@attrs.define
class Drawing:
    """A picture under construction. Coordinates are pixels from the top left corner.

    Attributes:
        width: Width of the whole picture.
        height: Height of the whole picture.
    """

    width: float
    height: float
    _elements: list[str] = attrs.field(factory=list, init=False)

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = "currentColor", width: float = 1, opacity: float = 1) -> None:
        """Draw a straight line."""
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._elements.append(f'<line {ends} stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}"/>')

    def arrow(self, points: list[tuple[float, float]], color: str = "currentColor") -> None:
        """Draw a line through points with an arrowhead at the last point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._elements.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        (x0, y0), (x1, y1) = points[-2:]
        length = max(abs(x1 - x0), abs(y1 - y0))
        dx, dy = (x1 - x0) / length * 6, (y1 - y0) / length * 6
        head = f"{x1:.1f},{y1:.1f} {x1 - dx - dy * 0.6:.1f},{y1 - dy + dx * 0.6:.1f} {x1 - dx + dy * 0.6:.1f},{y1 - dy - dx * 0.6:.1f}"
        self._elements.append(f'<polygon points="{head}" fill="{color}"/>')

    def dot(self, x: float, y: float, radius: float, color: str, filled: bool = True) -> None:
        """Draw a circle."""
        fill = color if filled else "none"
        self._elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{color}" stroke-width="1.5"/>')

    def box(self, x: float, y: float, width: float, height: float, color: str = GREY, fill: float = 0.15, radius: float = 4) -> None:
        """Draw a rectangle, filled with the opacity ``fill``."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"'
        self._elements.append(f'<rect {place} fill="{color}" fill-opacity="{fill}" stroke="{color}" stroke-width="1"/>')

    def text(
        self, x: float, y: float, text: str, size: float = 13, color: str = "currentColor", anchor: str = "start", bold: bool = False
    ) -> None:
        """Write a line of text. ``y`` is the base line of the text."""
        weight = ' font-weight="600"' if bold else ""
        style = f'font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}'
        self._elements.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>')

    def svg(self, title: str) -> str:
        """Return the picture on a single line, with a title for screen readers."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(title)}"'
        )
        return f'{head} font-family="system-ui, sans-serif">{"".join(self._elements)}</svg>'
