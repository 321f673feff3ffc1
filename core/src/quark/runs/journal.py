"""Journal of a run from disk: a file that lists the finished blocks, so that an interrupted run can be
resumed.

The journal has JSON lines and is beside the directory in which the export is built. The first line is a
header with the identity of the run (`quark.runs.identity`). Each further line is the entry of a finished
block. The entry is written and synchronized when the block is on the disk. Each line has a checksum, so that
an incomplete last line is recognized and ignored.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from quark.base.files import open_file, sync, sync_data, write_at
from quark.checkpoint.atomic_directory import JOURNAL
from quark.errors import ResumeError
from quark.runs.identity import RunIdentity

FORMAT = 1
"""Version of the journal's format. A journal of another version is refused."""


@attrs.frozen
class FinishedBlock:
    """An entry of the journal. All values are JSON values.

    Attributes:
        name: Full name of the block.
        checksums: Checksums of the block's stored tensors, by name
            (`quark.checkpoint.BlockStream.when_stored`).
        report: The block's part of the calibration report.
        learned: The state of the run after this block. Later blocks need this state.
    """

    name: str
    checksums: Mapping[str, str]
    report: Mapping[str, Any]
    learned: Mapping[str, Any]


class Journal:
    """The journal of one run. Any thread can add entries, but only one entry at a time.

    Args:
        path: The file.
        header: The header, with the identity of the run.
        finished: The entries of the finished blocks.
        end: Size of the valid part of the file in bytes. All later bytes are removed when the next entry is
            added.

    Attributes:
        header, finished: The arguments ``header`` and ``finished``. Entries that are added later are not in
            ``finished``.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], finished: Sequence[FinishedBlock], end: int) -> None:
        self.header = header
        self.finished = tuple(finished)
        self._path = path
        self._end = end

    @classmethod
    def begin(cls, directory: Path, identity: RunIdentity, *, two_passes: bool) -> Self:
        """Create the journal of a run that starts from the beginning.

        Args:
            directory: Directory in which the export is built. The files of the export have already been
                created. The journal is written beside this directory.
            identity: Identity of the run.
            two_passes: Whether the run computes each block twice. This is stored because it depends on the
                memory that was free at the start of the run.
        """
        files = sorted(path.name for path in directory.iterdir())
        header = {"format": FORMAT, "run": attrs.asdict(identity), "two_passes": two_passes, "files": files}
        journal = cls(directory.parent / JOURNAL, header, (), 0)
        journal._append(header)
        sync(directory)
        sync(directory.parent)
        return journal

    @classmethod
    def read(cls, partial: Path) -> Self:
        """Read the journal of an interrupted run, up to the first incomplete line.

        Args:
            partial: The directory that the journal is in.

        Raises:
            ResumeError: The header or an entry cannot be read, or the journal has another version.
        """
        path = partial / JOURNAL
        lines, ends = _lines(path.read_bytes())
        if not lines or lines[0].get("format") != FORMAT or not _are_entries(lines):
            raise ResumeError(
                f"the journal '{path}' is damaged or has another version. Set restart=True (--restart) to start from the beginning"
            )
        return cls(path, lines[0], [FinishedBlock(**line) for line in lines[1:]], ends[-1])

    @property
    def two_passes(self) -> bool:
        """Whether the run computes each block twice (`quark.runs.run.Run.two_passes`)."""
        return bool(self.header["two_passes"])

    def refuse_other_run(self, identity: RunIdentity) -> None:
        """Check that the interrupted run has the identity ``identity``.

        Raises:
            ResumeError: The identities differ. The message names the differences.
        """
        identity.refuse_other(
            f"the interrupted run in '{self._path.parent}'",
            self.header["run"],
            "Use the same settings to resume that run. Or start from the beginning with restart=True (--restart), which discards the "
            f"{len(self.finished)} finished block(s) of that run",
        )

    def remove_later_files(self, directory: Path) -> None:
        """Remove the files of an export that did not exist when the journal was created.

        Such files are written at the end of a run, and may be incomplete.
        """
        for path in directory.iterdir():
            if path.name not in self.header["files"]:
                if path.is_dir() and not path.is_symlink():
                    raise ResumeError(f"'{path}' is a directory that no run has created. Remove it to resume the run")
                path.unlink()

    def cut(self, count: int) -> None:
        """Remove all entries except the entries of the first ``count`` finished blocks."""
        self.finished = self.finished[:count]
        _, ends = _lines(self._path.read_bytes())
        self._end = ends[count]

    def add(self, block: FinishedBlock) -> None:
        """Add the entry of a finished block. When the method returns, the entry is on the disk."""
        self._append(attrs.asdict(block, recurse=False))

    def _append(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":"))
        data = f'{{"crc32":{zlib.crc32(text.encode())},"line":{text}}}\n'.encode()
        file = open_file(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(file, self._end)
            write_at(file, memoryview(data), self._end)
            sync_data(file)
        finally:
            os.close(file)
        self._end += len(data)


def _are_entries(lines: Sequence[Any]) -> bool:
    """Return whether the first line is a valid header and all other lines are valid entries."""
    header, *entries = lines
    kinds = {"name": str, "checksums": dict, "report": dict, "learned": dict}
    return (
        isinstance(header.get("run"), dict)
        and isinstance(header.get("two_passes"), bool)
        and isinstance(header.get("files"), list)
        and all(entry.keys() == kinds.keys() and all(isinstance(entry[key], kind) for key, kind in kinds.items()) for entry in entries)
    )


def _lines(data: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the lines before the first incomplete line, and for each of these lines the byte position of its
    end.
    """
    lines: list[dict[str, Any]] = []
    ends: list[int] = []
    end = 0
    for raw in data.splitlines(keepends=True):
        try:
            parsed = json.loads(raw) if raw.endswith(b"\n") else {}
            line = parsed["line"]
            is_complete = isinstance(line, dict) and zlib.crc32(json.dumps(line, separators=(",", ":")).encode()) == parsed["crc32"]
        except (ValueError, LookupError, TypeError, RecursionError):
            is_complete = False
        if not is_complete:
            break
        end += len(raw)
        lines.append(line)
        ends.append(end)
    return lines, ends
