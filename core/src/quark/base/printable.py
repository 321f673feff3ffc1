"""Texts of plugins, which are anybody's: which characters are not for display, and how they are shown instead."""

from __future__ import annotations

import unicodedata

__all__ = ["shown", "unprintable"]


def unprintable(text: str) -> str | None:
    """Return the first character that a terminal would obey or hide instead of showing it; None where there is none.

    Such are control characters, the escape that begins a terminal's commands among them, and marks that turn
    the direction of a text.

    >>> unprintable("4-bit weights"), unprintable("ends\\x1b[2J")
    (None, '\\x1b')
    """
    return None if text.isprintable() else next((character for character in text if not _is_shown(character)), None)


def shown(text: str) -> str:
    """Return a text with every such character written out, as Python writes it in a string.

    >>> print(shown("red \\x1b[31m and\\nnew"))
    red \\x1b[31m and\\nnew
    """
    if text.isprintable():
        return text
    return "".join(character if _is_shown(character) else repr(character)[1:-1] for character in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"
