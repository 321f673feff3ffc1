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
from quark.plugins.catalog import catalog
from quark_devkit.check import CheckFailedError, NotHereError, assume, check, require
from quark_devkit.fresh_process import in_fresh_process
from quark_devkit.option_effects import require_effects
from quark_devkit.side_effects import side_effects
from quark_devkit.subject import Subject, find_subject
from quark_workbench.data.samples import sample_of

_MOST = 64
"""Number of checked samples."""
_DAMAGED = bytes(range(256)) * 16
"""Bytes with which no text, table or archive begins."""


def read(subject: Subject, *path: Path) -> list[Any]:
    """Return the first samples of the source. A source that reads files gets the path of the file."""
    samples = subject.load("samples")
    try:
        return list(islice(samples(path=path[0]) if path else samples(), _MOST))
    except MissingPluginError as error:
        raise NotHereError(str(error)) from None


@contextmanager
def files_of(subject: Subject) -> Iterator[tuple[Path, ...]]:
    """Yield the example file of a source that reads files, as a tuple of one path. For other sources, yield
    an empty tuple."""
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
    with files_of(subject) as files:
        samples = read(subject, *files)
    for sample in samples:
        try:
            sample_of(sample, "it")
        except CalibrationError as error:
            raise CheckFailedError(str(error)) from None
    require(any(not isinstance(sample, str) or sample.strip() for sample in samples), "yields only blank samples")


@check("dataset")
def yields_the_same_again(subject: Subject) -> None:
    """The source yields the same samples in the same order each time, so that runs can be repeated."""
    with files_of(subject) as files:
        first, again = read(subject, *files), read(subject, *files)
    require(first == again, f"yields different samples the second time: {str(first)[:60]} and {str(again)[:60]}")


@check("dataset", since=2)
def reads_twice_at_once(subject: Subject) -> None:
    """If two readers take samples alternately, each gets the samples that a single reader would get. A sample
    does not change after it was yielded."""
    samples = subject.load("samples")
    with files_of(subject) as files:
        alone, *readers = (islice(samples(path=files[0]) if files else samples(), _MOST) for _ in range(3))
        wanted = [repr(sample) for sample in alone]
        pairs = list(zip(*readers, strict=False))
    together = [[repr(pair[number]) for pair in pairs] for number in range(2)]
    require(together == [wanted, wanted], "yields other samples if two readers read at once, or changes a sample that it has yielded")


@check("dataset")
def can_be_read_without_options(subject: Subject) -> None:
    """Every option has a default, so that the name of the source is enough."""
    with files_of(subject):
        required = [option.name for option in subject.registry.options(subject.lookup_name) if option.to_dict()["required"]]
    require(not required, f"requires the option '{next(iter(required), '')}': give it a default")


@check("dataset", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Different values of an option give different samples. A value may be refused instead, and an option may
    be declared to change only the cost."""
    samples = subject.load("samples")
    with files_of(subject) as files:
        path = {"path": files[0]} if files else {}
        require_effects(
            subject.registry.options(subject.lookup_name), lambda values: [[str(one) for one in islice(samples(**path, **values), _MOST)]]
        )


@check("dataset", since=2)
def reads_without_side_effects(subject: Subject) -> None:
    """Reading samples writes no file, unpickles nothing, starts no program and uses no network."""
    with files_of(subject) as files:
        effects = in_fresh_process(_effects_of_reading, subject.lookup_name, files)
    require(not effects, f"{effects[0] if effects else ''} when samples are read")


def _effects_of_reading(name: str, files: tuple[Path, ...]) -> list[str]:
    subject = find_subject(catalog(), "dataset", name)
    with side_effects() as effects:
        read(subject, *files)
    return [effect for effect in effects if not effect.startswith("changes the")]


@check("dataset")
def refuses_damaged_files(subject: Subject) -> None:
    """From a damaged file, the source yields samples, or it raises an error of quark that names the file. It
    raises no other error. If only the end of the file is damaged, no sample is lost without an error."""
    assume(subject.record.suffixes, "it reads no files")
    with files_of(subject) as (file,):
        sound, count = file.read_bytes(), len(read(subject, file))
        for content, least in ((_DAMAGED, 0), (sound + _DAMAGED, count)):
            file.write_bytes(content)
            try:
                samples = read(subject, file)
            except QuarkError as error:
                require(str(file) in str(error), f"refuses a damaged file without naming it: {error}")
            except Exception as error:
                raise CheckFailedError(f"raises {type(error).__name__} for a damaged file: raise quark.errors.CalibrationError") from None
            else:
                lost = f"yields {len(samples)} of {count} samples of a file with a damaged end, and raises no error"
                require(len(samples) >= least, lost)
