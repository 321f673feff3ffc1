"""The rule for names of schemes, formats, observers, algorithms, templates and exporters; the closest match."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

NAME_RULE = "lower-case letters and digits, in parts joined by '_' or '-'"
_NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")


def is_valid_name(name: object) -> bool:
    """Whether ``name`` is a string that follows `NAME_RULE`.

    >>> is_valid_name("int4_wo_128"), is_valid_name("Int4"), is_valid_name("_x")
    (True, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like ``name``, or None where none comes near.

    >>> closest("itn4_wo_128", ["int4_wo_128", "fp8"])
    'int4_wo_128'
    """
    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return found[0] if found else None
