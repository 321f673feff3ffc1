"""Readers of files with samples: plain text, JSON lines, and Parquet.

The functions that write small example files are for the conformance suite.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from quark.errors import CalibrationError
from quark.plugins import OptionNote
from quark_workbench.data.extras import extra
from quark_workbench.data.media_rows import with_files_below
from quark_workbench.data.samples import Sample, is_chat, samples_of
from quark_workbench.data.text_files import text_lines, whole_text

__all__ = ["json_lines", "parquet", "text", "write_json_lines", "write_parquet", "write_text"]

_EXAMPLE = ("The first text.", "Another one, with an ümlaut.", "A third.")


def text(path: Path, separator: Annotated[str, OptionNote(examples=("\n\n",))] = "") -> Iterator[Sample]:
    """Yield the text of a file: the whole text as one sample, or the pieces between separators.

    Args:
        path: A UTF-8 file, which may be compressed.
        separator: The text that separates two samples. If it is empty, the file is one sample.
    """
    content = whole_text(path)
    yield from (part for part in (content.split(separator) if separator else [content]) if part.strip())


def json_lines(path: Path, column: str | None = None, media: str = "") -> Iterator[Sample]:
    """Yield one sample for each line. A line is a JSON string, or an object with a text or with messages.

    An object may also have the path of an image under the key "image", or of a sound under "audio". Instead
    of lines, the file may have one JSON list of such values.

    Args:
        path: A UTF-8 file with one JSON value on each line. The file may be compressed.
        column: Key that holds the text or the messages; by default "text", or else "messages".
        media: Directory of the images and sounds; by default the directory of the file.

    Raises:
        CalibrationError: A line is not JSON or is not a sample, or it names an image or a sound that is
            missing or lies outside the directory.
    """
    yield from _located(_rows(path), column, _folder(path, media))


def parquet(path: Path, column: str | None = None, media: str = "") -> Iterator[Sample]:
    """Yield one sample for each row of a Parquet file.

    Args:
        path: The file.
        column: Column that holds the text or the messages; by default "text", or else "messages".
        media: Directory of the images and sounds whose paths are in the columns "image" and "audio". The
            default is the directory of the file.

    Raises:
        CalibrationError: The file is damaged, or a row is not a sample.
        MissingPluginError: The package that reads Parquet files is not installed.
    """
    pyarrow = extra("pyarrow", "Parquet files")
    reader = extra("pyarrow.parquet", "Parquet files")
    try:
        for batch in reader.ParquetFile(path).iter_batches():
            yield from _located(((f"'{path}'", row) for row in batch.to_pylist()), column, _folder(path, media))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise CalibrationError(f"'{path}' cannot be read as Parquet: {error}") from error


def write_text(path: Path) -> None:
    """Write a small text file."""
    path.write_text("\n\n".join(_EXAMPLE), encoding="utf-8", newline="\n")


def write_json_lines(path: Path) -> None:
    """Write a small file of JSON lines, with texts."""
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in _EXAMPLE), encoding="utf-8", newline="\n")


def write_parquet(path: Path) -> None:
    """Write a small Parquet file with a column ``text``.

    Raises:
        MissingPluginError: The package that writes Parquet files is not installed.
    """
    pyarrow, writer = extra("pyarrow", "Parquet files"), extra("pyarrow.parquet", "Parquet files")
    writer.write_table(pyarrow.table({"text": list(_EXAMPLE)}), path)


def _folder(path: Path, media: str) -> Path:
    """Return the directory of images and sounds: ``media``, or by default the directory of ``path``.

    Raises:
        CalibrationError: There is no directory ``media``.
    """
    if media and not Path(media).is_dir():
        raise CalibrationError(f"the option media={media} names no directory: give the directory of the images and sounds of '{path}'")
    return Path(media) if media else path.parent


def _located(rows: Iterator[tuple[str, object]], column: str | None, folder: Path) -> Iterator[Sample]:
    """Yield the sample of each row. A relative path of an image or a sound is looked up in ``folder``."""
    for where, row in rows:
        yield from (with_files_below(sample, folder, where) for sample in samples_of([(where, row)], column))


def _rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield pairs of a position and a value, from a file of JSON lines or a file with one JSON list."""
    for number, line in enumerate(text_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number > 1:
                raise CalibrationError(f"line {number} of '{path}' is not JSON: {error}") from error
            value = _whole(path)  # the whole file may be one list
            yield from ((f"entry {i} of '{path}'", entry) for i, entry in enumerate(value, 1))
            return
        if isinstance(value, list) and not is_chat(value):
            yield from ((f"entry {i} of line {number} of '{path}'", entry) for i, entry in enumerate(value, 1))
        else:
            yield f"line {number} of '{path}'", value


def _whole(path: Path) -> list[object]:
    """Return the JSON list in a file. The file must contain nothing else."""
    try:
        value = json.loads(whole_text(path))
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"'{path}' is neither JSON lines nor one JSON list: {error}") from error
    if not isinstance(value, list):
        raise CalibrationError(f"'{path}' holds one JSON object: write one object a line, or a list of objects")
    return value
