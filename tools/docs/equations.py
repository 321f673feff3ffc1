"""Equations of the documentation: TeX in the sources, MathML in the pages."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

__all__ = ["as_mathml"]

_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[\(\[](.*?)\\[\)\]]</\1>', flags=re.DOTALL)


def as_mathml(page: str) -> str:
    """Return a page of HTML with the equations of pymdownx.arithmatex as MathML."""
    return _EQUATION.sub(_mathml, page)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return f'<{match[1]} class="equation">{convert(html.unescape(match[2]).strip(), display=display)}</{match[1]}>'
