"""The FLOPs and bytes of a run by module."""

from __future__ import annotations

from collections.abc import Callable

from tools.costs.recorded import parts
from tools.costs.runs import Part
from tools.docs.pictures.svg import BLUE, GREEN, GREY, ORANGE, RED, Drawing

__all__ = ["cost_of_awq_gptq", "cost_of_gptq"]

_COLORS = {"forward": GREY, "statistics": GREEN, "transforms": ORANGE, "solve": BLUE}
_LEAST = 0.01
"""Parts below this share are drawn as one part."""
_LEFT, _WIDTH, _ROW = 350, 220, 22


def cost_of_gptq() -> Drawing:
    """Draw the parts of GPTQ."""
    return _bars("gptq")


def cost_of_awq_gptq() -> Drawing:
    """Draw the parts of AWQ, then GPTQ."""
    return _bars("awq+gptq")


def _bars(run: str) -> Drawing:
    """Draw a row for each part of a run. It shows the part's share of the FLOPs and of the bytes."""
    rows, columns = _rows(parts(run)), ("FLOPs ÷ a forward", "bytes ÷ weights")
    drawing = Drawing(900, 60 + _ROW * len(rows))
    values: tuple[Callable[[Part], float], ...] = (lambda part: part.flops, lambda part: part.bytes)
    for column, (title, value) in enumerate(zip(columns, values, strict=True)):
        x, most = _LEFT + column * (_WIDTH + 60), max(map(value, rows))
        drawing.text(x, 24, f"{title}: {sum(map(value, rows)):.3g} in all", 12, bold=True)
        for number, part in enumerate(rows):
            y, width = 40 + _ROW * number, _WIDTH * value(part) / most
            if value(part):
                drawing.box(x, y, width, _ROW - 6, _COLORS.get(part.phase, RED), 0.5, 2)
            drawing.text(x + width + 6, y + 12, f"{value(part):.2g}" if value(part) < 100 else f"{value(part):.0f}", 11, GREY)
    for number, part in enumerate(rows):
        drawing.text(_LEFT - 12, 52 + _ROW * number, f"{part.phase}: {part.module}" if part.module else part.phase, 11.5, anchor="end")
    return drawing


def _rows(every: list[Part]) -> list[Part]:
    """Return the parts to draw. The last one is the sum of all small parts."""
    flops, moved = sum(part.flops for part in every), sum(part.bytes for part in every)
    small = [part for part in every if part.flops < _LEAST * flops and part.bytes < _LEAST * moved]
    rest = Part("all others", "", sum(p.flops for p in small), sum(p.bytes for p in small), sum(p.operations for p in small))
    return [*(part for part in every if part not in small), rest]
