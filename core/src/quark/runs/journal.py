"""Journal of a run from disk: the identity of the run and its finished blocks, to resume it.

The journal is a file of JSON lines beside the directory in which the export is built. The first line is a
header (`quark.runs.identity`); each further line is the entry of a finished block. An entry is written and
synchronized after its block is on the disk. Each line has a checksum, so that an incomplete last line is
recognized and ignored.
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
        checksums: Checksums of its stored tensors, by name (`quark.checkpoint.BlockStream.when_stored`).
        report: The block's part of the calibration report.
        learned: State of the run after this block, which later blocks need.
    """

    name: str
    checksums: Mapping[str, str]
    report: Mapping[str, Any]
    learned: Mapping[str, Any]


class Journal:
    """The journal of one run, open for more entries. Entries may be added from another thread, one at a time.

    Args:
        path: The file.
        header: The header, with the identity of the run.
        finished: The finished blocks.
        end: Size of the valid part of the file; the rest is cut off.

    Attributes:
        header, finished: The arguments of these names. Added entries are not in ``finished``.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], finished: Sequence[FinishedBlock], end: int) -> None:
        self.header = header
        self.finished = tuple(finished)
        self._path = path
        self._end = end

    @classmethod
    def begin(cls, directory: Path, identity: RunIdentity, *, two_passes: bool) -> Self:
        """Return the journal of a run that starts from the beginning.

        Args:
            directory: Directory in which the export is built; its files have been created. The journal is
                beside it.
            identity: Identity of the run.
            two_passes: Memory mode of the run, which depends on the free memory at its start.
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
        """Return the journal of an interrupted run, up to its first incomplete line.

        Raises:
            ResumeError: The header or an entry cannot be read, or has another version.
        """
        path = partial / JOURNAL
        lines, ends = _lines(path.read_bytes())
        if not lines or lines[0].get("format") != FORMAT or not _are_entries(lines):
            raise ResumeError(
                f"the journal '{path}' is damaged, or of another version: set restart=True (--restart) to start from the beginning"
            )
        return cls(path, lines[0], [FinishedBlock(**line) for line in lines[1:]], ends[-1])

    @property
    def two_passes(self) -> bool:
        """The memory mode of the run."""
        return bool(self.header["two_passes"])

    def refuse_other_run(self, identity: RunIdentity) -> None:
        """Check that the interrupted run has this identity.

        Raises:
            ResumeError: The identities differ; the message names the differences.
        """
        identity.refuse_other(
            f"the interrupted run in '{self._path.parent}'",
            self.header["run"],
            "Ask for the same again to resume it, or start from the beginning with restart=True (--restart), which discards its "
            f"{len(self.finished)} finished block(s)",
        )

    def remove_later_files(self, directory: Path) -> None:
        """Remove the files of an export that did not exist when the run began.

        They are written at the end of the run, and may be incomplete.
        """
        for path in directory.iterdir():
            if path.name not in self.header["files"]:
                if path.is_dir() and not path.is_symlink():
                    raise ResumeError(f"'{path}' is a directory that was not made by a run: remove it to resume the run")
                path.unlink()

    def cut(self, count: int) -> None:
        """Forget all but the first ``count`` finished blocks."""
        self.finished = self.finished[:count]
        _, ends = _lines(self._path.read_bytes())
        self._end = ends[count]

    def add(self, block: FinishedBlock) -> None:
        """Add a finished block, and return when the entry is on the disk."""
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
    """Return whether lines have the form of a header followed by entries."""
    header, *entries = lines
    kinds = {"name": str, "checksums": dict, "report": dict, "learned": dict}
    return (
        isinstance(header.get("run"), dict)
        and isinstance(header.get("two_passes"), bool)
        and isinstance(header.get("files"), list)
        and all(entry.keys() == kinds.keys() and all(isinstance(entry[key], kind) for key, kind in kinds.items()) for entry in entries)
    )


def _lines(data: bytes) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the lines before the first incomplete one, and the end of each line in bytes."""
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
