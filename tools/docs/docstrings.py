"""Docstrings for the API pages: as Markdown, and with links where they name something that has a page."""

from __future__ import annotations

import re
from typing import Any

import griffe

from tools.docs.api import targets
from tools.docs.manual import as_markdown

__all__ = ["Docstrings"]

_NAME = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?![`\]])")


class Docstrings(griffe.Extension):
    """Rewrites every docstring when it is collected."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Replace the docstring of an object by its Markdown."""
        if obj.docstring is not None:
            obj.docstring.value = _NAME.sub(_linked, as_markdown(obj.docstring.value))


def _linked(match: re.Match[str]) -> str:
    target = targets().get(match[1])
    return f"[`{match[1]}`][{target}]" if target else match[0]
