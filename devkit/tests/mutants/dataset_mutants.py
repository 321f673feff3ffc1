"""Sources of text with one thing wrong each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from quark.base.lazy import ObjectRef
from quark.errors import CalibrationError
from quark.plugins import DatasetRecord

from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]

_COUNT = itertools.count()
_LINES: list[str] = []


def healthy(path: Path, separator: str = "\n") -> Iterator[Any]:
    yield from path.read_text(encoding="utf-8", errors="replace").split(separator)


def write(path: Path) -> None:
    path.write_text("one\ntwo", encoding="utf-8")


def numbers(path: Path) -> Iterator[Any]:
    yield from (1, 2)


def blank(path: Path) -> Iterator[Any]:
    yield from ("", " ")


def counted(path: Path) -> Iterator[Any]:
    yield f"sample {next(_COUNT)}"


def demanding(path: Path, column: str) -> Iterator[Any]:
    yield column


def strict(path: Path) -> Iterator[Any]:
    yield path.read_text(encoding="utf-8")


def nameless(path: Path) -> Iterator[Any]:
    if path.read_bytes() != b"one\ntwo":
        raise CalibrationError("this file is damaged")
    yield "one"


def giving_up(path: Path) -> Iterator[Any]:
    with suppress(UnicodeDecodeError):
        yield from path.read_text(encoding="utf-8").splitlines()


def idle(path: Path, separator: str = "\n", largest: int = 99) -> Iterator[Any]:
    yield from healthy(path, separator)


def sharing(path: Path) -> Iterator[Any]:
    """Yields the lines of the one list that all readers of this process share."""
    _LINES[:] = healthy(path)
    while _LINES:
        yield _LINES.pop(0)


def changing(path: Path) -> Iterator[Any]:
    """Yields one chat for all lines, with the words of each line in turn."""
    message = {"role": "user", "content": ""}
    for line in healthy(path):
        message["content"] = line
        yield [message]


def caching(path: Path) -> Iterator[Any]:
    path.with_suffix(".cache").write_text("read", encoding="utf-8")
    yield "one"


def record_of(samples: Callable[..., Iterator[Any]], **fields: Any) -> DatasetRecord:
    usual = {"name": "mutant_lines", "samples": ObjectRef(samples), "suffixes": [".lines"], "example": ObjectRef(write)}
    return DatasetRecord(**(usual | fields))


def mutant(check: str, about: str, samples: Callable[..., Iterator[Any]], **fields: Any) -> Mutant:
    return Mutant(f"dataset:{check}", about, (record_of(samples, **fields),))


HEALTHY = (record_of(healthy),)
MUTANTS = [
    mutant("yields_samples", "yields numbers", numbers),
    mutant("yields_samples", "yields blank texts", blank),
    mutant("yields_samples", "has no example of its files", healthy, example=None),
    mutant("yields_the_same_again", "yields something new each time", counted),
    mutant("reads_twice_at_once", "shares its place in a file", sharing),
    mutant("reads_twice_at_once", "changes what it has yielded", changing),
    mutant("can_be_read_without_options", "has an option without a default", demanding),
    mutant("heeds_its_options", "does nothing with one option", idle),
    mutant("reads_without_side_effects", "leaves a file beside its own", caching),
    mutant("refuses_damaged_files", "raises UnicodeDecodeError", strict),
    mutant("refuses_damaged_files", "yields nothing without an error", giving_up),
    mutant("refuses_damaged_files", "does not name the file", nameless),
]
