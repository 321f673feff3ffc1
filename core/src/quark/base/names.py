"""Functions that check names, find the most similar name, match shell patterns, and fold many names into a
few patterns for messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

NAME_RULE = "lower-case letters and digits, in parts joined by '_' or '-'"
_NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_Part = str | tuple[int, ...]
"""Part of a dotted name or of a pattern: a word, or the numbers that the folded names have at this
position."""


def is_valid_name(name: object) -> bool:
    """Return whether ``name`` is a string that follows `NAME_RULE`.

    >>> is_valid_name("int4_wo_128"), is_valid_name("Int4"), is_valid_name("_x")
    (True, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def is_vendor_name(name: object) -> bool:
    """Return whether ``name`` is a string ``vendor.name`` whose two parts follow `NAME_RULE`.

    The core has a fixed set of names, and plugins add names of this form. The vendor prefix prevents two
    plugins from using the same name. It also shows that the name is not a misspelt name of the core.

    >>> is_vendor_name("acme.sparse"), is_vendor_name("sparse"), is_vendor_name("acme.")
    (True, False, False)
    """
    return isinstance(name, str) and name.count(".") == 1 and all(is_valid_name(part) for part in name.split("."))


def has_wildcard(pattern: str) -> bool:
    """Return whether a shell pattern has a wildcard.

    A pattern without wildcards matches only the name that equals it.
    """
    return "*" in pattern or "?" in pattern or "[" in pattern


def matches(name: str, pattern: str) -> bool:
    """Return whether a shell pattern matches a name. Upper and lower case differ.

    A pattern without wildcards is compared directly. `fnmatch` would be slow for the thousands of full names
    in the configuration of a checkpoint, because it caches fewer patterns.

    >>> matches("layers.0.up_proj", "*.up_proj"), matches("layers.0.up_proj", "up_proj")
    (True, False)
    """
    return fnmatchcase(name, pattern) if has_wildcard(pattern) else name == pattern


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to ``name``, or None if none is similar.

    >>> closest("itn4_wo_128", ["int4_wo_128", "fp8"])
    'int4_wo_128'
    """
    matches = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def fold_names(names: Iterable[str]) -> list[str]:
    """Return patterns such as ``layers.{0-2}.q`` that match the given names and no other names.

    Dotted names that differ only in their numbers are folded into one pattern.

    Args:
        names: Full names of modules or tensors.

    Returns:
        The patterns, sorted by the position of the first name of each pattern. A name that cannot be folded
        with another name is its own pattern.

    >>> fold_names(["layers.0.q", "layers.1.q", "layers.2.q", "layers.0.k", "layers.2.k", "head"])
    ['layers.{0-2}.q', 'layers.{0,2}.k', 'head']
    """
    split: list[tuple[_Part, ...]] = [tuple(_part(part) for part in name.split(".")) for name in dict.fromkeys(names)]
    for place in range(max(map(len, split), default=0) - 1, -1, -1):
        split = _fold_at(split, place)
    return [".".join(part if isinstance(part, str) else _numbers(part) for part in parts) for parts in split]


def folded(names: Iterable[str], most: int = 8) -> str:
    """Return folded names for a message, separated by commas.

    The result lists at most ``most`` patterns, and ends with the number of patterns that are not listed.

    >>> folded([f"layers.{i}.{p}" for i in range(80) for p in "qkv"], most=2)
    'layers.{0-79}.q, layers.{0-79}.k and 1 more'
    """
    patterns = fold_names(names)
    rest = f" and {len(patterns) - most} more" if len(patterns) > most else ""
    return ", ".join(patterns[:most]) + rest


def without_numbers(name: str) -> str:
    """Return ``name`` with each number replaced by ``*``. Names for which this function returns the same text
    can be folded.

    >>> without_numbers("layers.0.mlp.experts.7.up_proj")
    'layers.*.mlp.experts.*.up_proj'
    """
    return ".".join(part if isinstance(_part(part), str) else "*" for part in name.split("."))


def _part(text: str) -> _Part:
    # Numbers in module names have no leading zero and few digits. A damaged file may contain other numbers.
    return (int(text),) if text == "0" or _NUMBER.fullmatch(text) else text


def _fold_at(names: Iterable[tuple[_Part, ...]], place: int) -> list[tuple[_Part, ...]]:
    """Merge names that differ only in the numbers at the index ``place``. A name is a tuple of its parts."""
    merged: dict[tuple[_Part | None, ...], list[tuple[_Part, ...]]] = {}
    for name in names:
        has_number = len(name) > place and not isinstance(name[place], str)
        merged.setdefault((*name[:place], None, *name[place + 1 :]) if has_number else name, []).append(name)
    return [_joined(members, place) for members in merged.values()]


def _joined(members: list[tuple[_Part, ...]], place: int) -> tuple[_Part, ...]:
    if len(members) == 1:
        return members[0]
    numbers = sorted(number for member in members for number in member[place] if isinstance(number, int))
    return (*members[0][:place], tuple(numbers), *members[0][place + 1 :])


def _numbers(numbers: tuple[int, ...]) -> str:
    """Return numbers as text: ``7`` for one number, ``{0-3}`` for a range, and ``{0-3,5}`` for several
    ranges."""
    if len(numbers) == 1:
        return str(numbers[0])
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return "{" + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges) + "}"
