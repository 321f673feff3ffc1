"""Readers of UTF-8 text files, which may be compressed and may begin with a byte order mark."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quark.errors import CalibrationError
from quark_workbench.data.extras import extra

__all__ = ["opened_text", "text_lines", "whole_text", "without_compression"]

_COMPRESSED = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\0", ".zst": b"\x28\xb5\x2f\xfd"}
"""Dictionary from the ending of a compressed file to the first bytes of such files."""
_MODULES = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
_WIDE = {b"\xff\xfe": "UTF-16 or UTF-32", b"\xfe\xff": "UTF-16"}
_LONGEST_LINE, _LONGEST_TEXT = 1 << 28, 1 << 32
"""Largest number of characters in a line and in a text. A larger file may decompress without end."""


def without_compression(file: Path) -> Path:
    """Return the path of a file without an ending for compression, such as ``.gz``.

    >>> without_compression(Path("c4.jsonl.gz")).name
    'c4.jsonl'
    """
    return file.with_suffix("") if file.suffix.lower() in _COMPRESSED else file


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file.

    A line that is too long is an error. Other errors are as in `opened_text`.
    """
    with opened_text(path) as file:
        while line := file.readline(_LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                raise CalibrationError(f"'{path}' has a line of more than {_LONGEST_LINE:,} characters: write one sample a line")
            yield line


def whole_text(path: Path) -> str:
    """Return the text of a file.

    A text that is too long is an error. Other errors are as in `opened_text`.
    """
    with opened_text(path) as file:
        content = file.read(_LONGEST_TEXT)
    if len(content) == _LONGEST_TEXT:
        raise CalibrationError(f"'{path}' has more than {_LONGEST_TEXT:,} characters: give a part of the file, or JSON lines")
    return content


@contextmanager
def opened_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """Yield an open text file. If the first bytes mark a compressed file, it is decompressed.

    A byte order mark is skipped. Half of a surrogate pair is no error here, since
    `quark_workbench.data.sources` leaves out samples with such text.

    Raises:
        CalibrationError: There is no such file, the path is a pipe or a device, the file is damaged, or it
            is not UTF-8 text.
        MissingPluginError: The package that decompresses the file is not installed.
    """
    if not path.is_file():
        raise CalibrationError(f"'{path}' is not a regular file (a pipe, a device, or missing): write the text to a file first")
    with path.open("rb") as file:
        first = file.read(8)
    if wide := next((name for mark, name in _WIDE.items() if first.startswith(mark)), None):
        raise CalibrationError(f"'{path}' is {wide}, but text must be UTF-8: convert it, as with iconv -f UTF-16 -t UTF-8")
    compression = next((ending for ending, mark in _COMPRESSED.items() if first.startswith(mark)), None)
    with (
        _decompressed(path, compression) as raw,
        io.TextIOWrapper(io.BufferedReader(_Checked(raw, path)), "utf-8-sig", "surrogatepass") as text,
    ):
        try:
            yield text
        except UnicodeDecodeError as error:
            raise CalibrationError(
                f"'{path}' is not UTF-8 text (the byte 0x{error.object[error.start]:02x}: {error.reason}). Convert it, as with iconv -f "
                f"LATIN1 -t UTF-8"
            ) from error


def _decompressed(path: Path, compression: str | None) -> Any:
    """Return an open binary file. Its data are decompressed while the file is read."""
    if compression is None:
        return path.open("rb")
    if compression == ".zst":
        return extra("pyarrow", "files compressed by Zstandard").input_stream(str(path), compression="zstd")
    return extra(_MODULES[compression], f"{compression} files").open(path, "rb")


class _Checked(io.RawIOBase):
    """A stream of a file's bytes that raises an error if it reads a zero byte."""

    def __init__(self, raw: Any, path: Path) -> None:
        self._raw, self._path = raw, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._raw.read(len(buffer))
        except Exception as error:  # each decompressor has its own errors
            raise CalibrationError(f"'{self._path}' is damaged ({error or type(error).__name__}): download it again") from error
        if b"\0" in data:
            raise CalibrationError(f"'{self._path}' holds zero bytes, so it is not UTF-8 text: convert it if it is UTF-16")
        buffer[: len(data)] = data
        return len(data)
