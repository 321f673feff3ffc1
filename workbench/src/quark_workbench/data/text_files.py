"""Files of text, plain or compressed: UTF-8, with or without a mark of byte order, and nothing else."""

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
"""How the bytes of a compressed file begin, by its ending."""
_MODULES = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
_WIDE = {b"\xff\xfe": "UTF-16 or UTF-32", b"\xfe\xff": "UTF-16"}
_LONGEST_LINE, _LONGEST_TEXT = 1 << 28, 1 << 32
"""Characters of one line, and of a text that is read whole: more is an archive that never ends."""


def without_compression(file: Path) -> Path:
    """Return the name that a file has without the ending of its compression.

    >>> without_compression(Path("c4.jsonl.gz")).name
    'c4.jsonl'
    """
    return file.with_suffix("") if file.suffix.lower() in _COMPRESSED else file


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file. Raises as `opened_text`, or for a line that never ends."""
    with opened_text(path) as file:
        while line := file.readline(_LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                raise CalibrationError(f"'{path}' has a line of more than {_LONGEST_LINE:,} characters: it is no text of samples")
            yield line


def whole_text(path: Path) -> str:
    """Return the text of a file. Raises as `opened_text`, or if it is too long."""
    with opened_text(path) as file:
        content = file.read(_LONGEST_TEXT)
    if len(content) == _LONGEST_TEXT:
        raise CalibrationError(f"'{path}' has more than {_LONGEST_TEXT:,} characters: give a part of it, or JSON lines")
    return content


@contextmanager
def opened_text(path: Path) -> Iterator[io.TextIOWrapper]:
    """Yield a file of text, decompressed if its first bytes are those of a compressed file.

    A mark of byte order is skipped. Halves of surrogate pairs pass: `quark_workbench.data.sources` leaves
    out samples with such.

    Raises:
        CalibrationError: It is a pipe, a device or no file; or it holds something else than text in UTF-8,
            or is damaged.
        MissingPluginError: What decompresses it is not installed.
    """
    if not path.is_file():
        raise CalibrationError(f"'{path}' is no regular file (it is a pipe, a device or not there): write the text to a file first")
    with path.open("rb") as file:
        first = file.read(8)
    if wide := next((name for mark, name in _WIDE.items() if first.startswith(mark)), None):
        raise CalibrationError(f"'{path}' is {wide}, and text is read as UTF-8: convert it, as with iconv -f UTF-16 -t UTF-8")
    compression = next((ending for ending, mark in _COMPRESSED.items() if first.startswith(mark)), None)
    with (
        _decompressed(path, compression) as raw,
        io.TextIOWrapper(io.BufferedReader(_Checked(raw, path)), "utf-8-sig", "surrogatepass") as text,
    ):
        try:
            yield text
        except UnicodeDecodeError as error:
            raise CalibrationError(
                f"'{path}' is no text in UTF-8 (the byte 0x{error.object[error.start]:02x}: {error.reason}). Convert it if it has another "
                "encoding, as with iconv -f LATIN1 -t UTF-8"
            ) from error


def _decompressed(path: Path, compression: str | None) -> Any:
    """Return a file of bytes, opened, and decompressed when it is read."""
    if compression is None:
        return path.open("rb")
    if compression == ".zst":
        return extra("pyarrow", "files compressed by Zstandard").input_stream(str(path), compression="zstd")
    return extra(_MODULES[compression], f"{compression} files").open(path, "rb")


class _Checked(io.RawIOBase):
    """The bytes of a file, checked while they are read: text holds no byte 0."""

    def __init__(self, raw: Any, path: Path) -> None:
        self._raw, self._path = raw, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._raw.read(len(buffer))
        except Exception as error:  # of whatever decompresses it
            raise CalibrationError(
                f"'{self._path}' cannot be read ({error or type(error).__name__}): it is damaged, fetch it again"
            ) from error
        if b"\0" in data:
            raise CalibrationError(f"'{self._path}' holds bytes 0, which no text in UTF-8 has: it is UTF-16, or no text")
        buffer[: len(data)] = data
        return len(data)
