"""The tables of the listing commands, with one line per row.

In a terminal, no line is wider than the terminal. Control characters are escaped.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from quark.base.log import shown

__all__ = ["paragraphs", "table", "terminal_width"]

_GAP = "  "
_LEAST = 16
"""Least width of a cut column, in characters.

If there is less space, the column and all columns after it are dropped.
"""


def terminal_width() -> int | None:
    """Return the width of the terminal on stdout, or None if stdout is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> tuple[list[str], list[str]]:
    """Return the aligned lines of a table, titles first. Columns that are empty in every row are left out.

    Args:
        titles: Titles of the columns, the most important first.
        rows: The cells of each row, in the order of the titles. Control characters are escaped
            (`quark.base.log.shown`).
        width: The largest length of a line. Columns at the right that do not fit are dropped, and the last
            remaining column is shortened to fit. The first column is never shortened. None keeps all columns.

    Returns:
        The lines, and the titles of the columns that did not fit.
    """
    used = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    cells = [[titles[i] for i in used], *([shown(row[i]) for i in used] for row in rows)]
    natural = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths = natural if width is None else _fitted(natural, width)
    lines = [_line(row, widths) for row in cells]
    rule = _line(["-" * size for size in widths], widths)
    return [lines[0], rule, *lines[1:]], [titles[i] for i in used[len(widths) :]]


def paragraphs(entries: Sequence[tuple[str, str]], width: int | None = None) -> list[str]:
    """Return the lines of paragraphs. Each entry is a pair of a heading and a text.

    The text is printed below its heading, indented and wrapped to ``width``. If ``width`` is None, each text
    is one line.
    """
    lines = []
    for head, text in entries:
        lines.append(f"  {shown(head)}")
        room, prose = max(_LEAST, (width or 0) - 6), shown(" ".join(text.split()))
        lines += [f"      {line}" for line in (textwrap.wrap(prose, room) if width else [prose] if prose else [])]
    return lines


def _fitted(natural: Sequence[int], width: int) -> list[int]:
    """Return the widths of the columns that fit into ``width``. ``natural`` has their full widths."""
    widths = list(natural[:1])
    for size in natural[1:]:
        room = width - sum(widths) - len(_GAP) * len(widths)
        if room < min(size, _LEAST):
            break
        widths.append(min(size, room))
        if room < size:
            break
    return widths


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    shown = [cell if len(cell) <= size else cell[: size - 1] + "…" for cell, size in zip(cells, widths, strict=False)]
    return _GAP.join(cell.ljust(size) for cell, size in zip(shown, widths, strict=True)).rstrip()
