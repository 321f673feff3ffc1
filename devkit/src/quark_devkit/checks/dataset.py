"""Checks of data sources: samples are valid and repeatable; damaged files are refused.

A source that reads files is checked on the file from its record's ``example``. Checks download no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quark.errors import CalibrationError, MissingPluginError, QuarkError
from quark_devkit.check import CheckFailedError, NotHereError, assume, check, require
from quark_devkit.subject import Subject
from quark_workbench.data.samples import sample_of

_MOST = 64
"""Number of checked samples."""
_DAMAGED = bytes(range(256)) * 16
"""First bytes that no text, table or archive has."""


def _read(subject: Subject, *path: Path) -> list[Any]:
    """The first samples; from a file if the source reads files."""
    samples = subject.load("samples")
    try:
        return list(islice(samples(path=path[0]) if path else samples(), _MOST))
    except MissingPluginError as error:
        raise NotHereError(str(error)) from None


@contextmanager
def _files(subject: Subject) -> Iterator[tuple[Path, ...]]:
    """Yield the example file of a source that reads files, as a tuple of one; else an empty tuple."""
    record = subject.record
    if record.is_online:
        raise NotHereError("its data are downloaded")
    if not record.suffixes:
        yield ()
        return
    if record.example is None:
        raise CheckFailedError("reads files, but its record has no example: give a function that writes a small file to a path")
    with TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        file = Path(directory, f"example{record.suffixes[0]}")
        try:
            subject.load("example")(file)
        except MissingPluginError as error:
            raise NotHereError(str(error)) from None
        yield (file,)


@check("dataset")
def yields_samples(subject: Subject) -> None:
    """Every sample is a text or a chat, and at least one is not blank."""
    with _files(subject) as files:
        samples = _read(subject, *files)
    for sample in samples:
        try:
            sample_of(sample, "it")
        except CalibrationError as error:
            raise CheckFailedError(str(error)) from None
    require(any(not isinstance(sample, str) or sample.strip() for sample in samples), "yields only blank samples")


@check("dataset")
def yields_the_same_again(subject: Subject) -> None:
    """It yields the same samples in the same order each time, so that runs can be repeated."""
    with _files(subject) as files:
        first, again = _read(subject, *files), _read(subject, *files)
    require(first == again, f"yields different samples the second time: {str(first)[:60]} and {str(again)[:60]}")


@check("dataset")
def can_be_read_without_options(subject: Subject) -> None:
    """Every option has a default, so that the name of the source is enough."""
    with _files(subject):
        required = [option.name for option in subject.registry.options(subject.lookup_name) if option.to_dict()["required"]]
    require(not required, f"needs the option '{next(iter(required), '')}'")


@check("dataset")
def refuses_damaged_files(subject: Subject) -> None:
    """A damaged file gives samples, or an error of quark that names the file, but no other error."""
    assume(subject.record.suffixes, "it reads no files")
    with _files(subject) as (file,):
        file.write_bytes(_DAMAGED)
        try:
            _read(subject, file)
        except QuarkError as error:
            require(str(file) in str(error), f"refuses a damaged file without naming it: {error}")
        except Exception as error:
            raise CheckFailedError(f"raises {type(error).__name__} for a damaged file: raise quark.errors.CalibrationError") from None
