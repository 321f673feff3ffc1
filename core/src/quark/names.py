"""The rule for names of schemes, formats, algorithms and so on; the closest match; names of layers, folded."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from math import prod

NAME_RULE = "lower-case letters and digits, in parts joined by '_' or '-'"
_NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


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


def folded(names: Iterable[str], most: int = 8) -> str:
    """Layers' names on one line: those that differ in numbers only are one entry, and entries beyond ``most`` are counted.

    >>> folded(["layers.0.q", "layers.1.q", "layers.3.q", "lm_head"])
    'layers.{0-1,3}.q, lm_head'
    """
    groups: dict[str, list[list[int]]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append([int(n) for n in _NUMBER.findall(name)])
    entries = [_entry(pattern, numbers) for pattern, numbers in groups.items()]
    more = f" and {len(entries) - most} more such names" if len(entries) > most else ""
    return ", ".join(entries[:most]) + more


def _entry(pattern: str, numbers: list[list[int]]) -> str:
    places = [sorted(set(place)) for place in zip(*numbers, strict=True)]
    if prod(map(len, places)) != len(numbers):
        return f"{pattern} ({len(numbers)})"
    for place in places:
        pattern = pattern.replace("*", _ranges(place), 1)
    return pattern


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers: ``{0-3,7}``, or the one that there is."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) + "}"
