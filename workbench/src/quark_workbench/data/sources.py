"""Sources of samples. A source is selected by its name, or by the ending of the file that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quark.base.log import get_logger
from quark.errors import AmbiguousNameError, CalibrationError
from quark.plugins import datasets
from quark.plugins.attribution import attributed, origin
from quark.plugins.options import checked
from quark_workbench.data.samples import Sample, is_unicode, sample_of
from quark_workbench.data.text_files import without_compression

__all__ = ["read_samples"]

_PLAIN = "text"
"""Name of the source for files with an ending that no source reads."""
_END: Any = object()


def read_samples(spec: str | Path, options: Mapping[str, Any] | None = None) -> Iterator[Sample]:
    """Return the samples of a file, of a directory, or of a registered source.

    The files of a directory must be of one kind. They are read in order of name.

    Args:
        spec: A name of `quark.datasets`, or a path. A text that is both a name and a path is read as a name,
            but ``./name`` and a `pathlib.Path` are always paths.
        options: Options of the source. If ``spec`` names a source that reads files, the option ``path`` must
            name the file, which may have any ending.

    Raises:
        CalibrationError: There is no such source or path, or the files of a directory are unreadable or of
            several kinds. While you iterate: there is no sample, or a value is not a sample.
        ConfigError: The source has no such option, or the option has another type.
        AmbiguousNameError: Several sources read files with that ending.
        MissingPluginError: The source needs a package that is not installed.
        PluginError: The code of a plugin failed.

    >>> read_samples("text")
    Traceback (most recent call last):
    quark.errors.CalibrationError: the source 'text' reads files: give the path of a file instead
    """
    options = dict(options or {})
    name = str(spec)
    if isinstance(spec, Path) or name not in datasets():
        files = _files_of(Path(spec))
        return _read(_source_of(files[0]) or _PLAIN, files, options)
    if not datasets().get(name).suffixes:
        return _read(name, [], options)
    if "path" not in options:
        raise CalibrationError(f"the source '{name}' reads files: give the path of a file instead")
    file = Path(options.pop("path"))
    if not file.is_file():
        raise CalibrationError(f"there is no file '{file}' for the source '{name}' to read")
    return _read(name, [file], options)


def _read(name: str, files: list[Path], options: dict[str, Any]) -> Iterator[Sample]:
    """Return the samples of a source. If the source reads files, it reads each of ``files``.

    The options are checked at the call, before the first sample is read.
    """
    given = checked(f"the source '{name}'", datasets().options(name), options)
    samples = datasets().load_samples(name)
    readers = [(f"'{file}'", partial(samples, path=file, **given)) for file in files]
    return _samples(name, readers or [(f"the source '{name}'", partial(samples, **given))])


def _samples(name: str, readers: Sequence[tuple[str, Callable[[], Iterable[object]]]]) -> Iterator[Sample]:
    """Yield the samples of all ``readers``, which are pairs of a name for messages and a function."""
    is_empty, broken = True, 0
    try:
        for where, reader in readers:
            with attributed(f"reading {where}", origin("datasets", name)):
                values = iter(reader())
            while True:
                with attributed(f"reading {where}", origin("datasets", name)):
                    value = next(values, _END)
                if value is _END:
                    break
                sample = sample_of(value, where)
                if not is_unicode(sample):
                    broken += 1
                    continue
                is_empty = False
                yield sample
    finally:
        if broken:
            get_logger(__name__).warning(
                f"{broken} sample(s) are left out: they hold half of a surrogate pair, and no tokenizer reads such text."
            )
    if is_empty:
        raise CalibrationError(f"{', '.join(where for where, _ in readers)} holds no text: give samples that are not empty")


def _source_of(file: Path) -> str | None:
    """Return the name of the source that reads files with this ending, or None if no source does."""
    endings = (file.suffix.lower(), without_compression(file).suffix.lower())
    names = next((names for ending in endings if (names := [record.name for record in datasets() if ending in record.suffixes])), [])
    if len(names) > 1:
        raise AmbiguousNameError(
            f"the sources {' and '.join(names)} both read files like '{file}': name one of the sources, with the option path={file}"
        )
    return next(iter(names), None)


def _files_of(path: Path) -> list[Path]:
    """Return ``path`` if it is a file, or else the files of the directory ``path`` that a source can read."""
    if not path.exists():
        known = ", ".join(datasets().names())
        raise CalibrationError(f"'{path}' is not a file, a directory or a data source. The sources are: {known}")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CalibrationError(f"'{path}' is a pipe or a device, not a file: write the text to a file first")
    files = [file for file in sorted(path.iterdir()) if file.is_file() and _source_of(file) is not None]
    kinds = sorted({without_compression(file).suffix.lower() for file in files})
    if not files:
        known = ", ".join(sorted(suffix for record in datasets() for suffix in record.suffixes))
        raise CalibrationError(f"the directory '{path}' has no file that a source can read: give files of the kinds {known}")
    if len({_source_of(file) for file in files}) > 1:
        raise CalibrationError(
            f"the directory '{path}' has files of several kinds, {', '.join(kinds)}: name one file, or move each kind to its own directory"
        )
    return files
