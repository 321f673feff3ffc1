"""Atomic output directories. An export is written to a temporary directory, which is renamed when complete.

The temporary directory is hidden. For the output OUT, the directory ``.OUT.xxxxxxxx.partial`` is beside OUT.
The directory is removed if the export fails. If the process is killed, the directory stays until the next
run. While the process runs, it locks a file in the directory. The system releases the lock when the process
ends, so a directory whose lock is free is a leftover. A journal (`JOURNAL`) has a line for each finished
block. If there are finished blocks, the directory stays even if the export fails, because a later run can
continue from these blocks. The directory is then removed only on request.

If the new export replaces an earlier export, the two directories are exchanged in one step. If the file
system cannot exchange directories, the earlier export is moved to the temporary directory before the new
export is renamed. If the process is killed between these steps, the next run moves the earlier export back.
Before an export is renamed, all its files are flushed to the disk.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import attrs

from quark.base.files import open_file, open_own, pread, sync, try_lock, write_at
from quark.base.interrupts import uninterrupted
from quark.base.log import get_logger
from quark.checkpoint.destination import REPLACED, move_into_place, refuse_used_directory
from quark.errors import OutputError, ResumeError

Leftover = Literal["refuse", "resume", "restart"]
"""What a run does if an earlier run has left finished blocks: raise an error, continue from them, or remove
them.
"""

JOURNAL = "journal.jsonl"
"""Name of the journal in a temporary directory.

It has one line for the run and one for each finished block.
"""

_SUFFIX = ".partial"
_LOCK = "owner.lock"
_CONTENT = "checkpoint"
_FIXES = {
    errno.ENOSPC: "there is no space left on the device; free some, or choose another place",
    errno.EDQUOT: "your quota is used up; free some space, or choose another place",
    errno.EACCES: "you may not write there, or another program has a file there open; choose another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n 4096), or close other programs",
    errno.ENFILE: "close other programs: the machine has too many files open",
    errno.ENOMEM: "close other programs, or give a smaller --activation-memory (activation_memory)",
    errno.EROFS: "the file system is read-only; choose another place",
}


_BOTH_WAYS = (
    "Start the same run again with resume=True (--resume) to continue after these blocks, or with restart=True (--restart) to discard them "
    "and begin again"
)


@attrs.frozen
class _Partial:
    """A temporary directory that this process has locked. ``lock`` is the descriptor of the lock file."""

    path: Path
    lock: int


@contextmanager
def building(
    out: Path, exporter: str | None = None, *, overwrite: bool = False, leftover: Leftover = "refuse", source: Path | None = None
) -> Iterator[Path]:
    """Yield a temporary directory beside ``out``.

    If the ``with`` statement succeeds, the directory is renamed to ``out``. If the statement raises an error,
    the directory is removed, except if it has finished blocks. If the process is killed, the directory stays.
    SIGTERM kills the process too, except if the program uses `quark.base.interrupts.termination_unwinds` like
    the command ``quark``. Before the function creates a directory, it removes those leftovers of earlier runs
    with the same output that have no finished blocks.

    Args:
        out: The output directory. It must be free (`quark.checkpoint.destination.refuse_used_directory`).
        exporter: Name of the exporter. `refuse_used_directory` gets this argument.
        overwrite: Whether to replace an earlier export in ``out``.
        leftover: What to do if there is a leftover with finished blocks. With ``"resume"``, the function
            yields this leftover.
        source: The float checkpoint. `refuse_used_directory` gets this argument.

    Raises:
        OutputError: ``out`` is in use, another process is writing to it, or there is no space or permission
            to write.
        ResumeError: There is a leftover with finished blocks, and ``leftover`` is ``"refuse"``.
    """
    out = _resolved(out)
    partial: _Partial | None = None
    is_complete = False
    try:
        partial = _free_leftover(out, leftover)
        refuse_used_directory(out, exporter, overwrite=overwrite, source=source)
        out.parent.mkdir(parents=True, exist_ok=True)
        with uninterrupted():
            partial = partial or _new(out)
            with _leftovers(out, own=partial.path):  # raises an error if another process began at the same time
                pass
        directory = partial.path / _CONTENT
        directory.mkdir(exist_ok=True)
        yield directory
        _synchronize_all(directory)
        with uninterrupted():
            move_into_place(directory, out, exporter, overwrite=overwrite, source=source)
            is_complete = True
            _synchronize_name(out)
    except BaseException as error:
        # A second Ctrl-C would interrupt the cleanup after the first.
        with uninterrupted():
            left = _abandon(partial, out, is_complete=is_complete)
        if not isinstance(error, OSError) or isinstance(error, OutputError) or error.errno is None or not _is_of(error, out):
            raise
        fix = _FIXES.get(error.errno, "choose another place")
        raise OutputError(f"'{out}' could not be written ({error.strerror}): {fix}. {left}") from error
    with uninterrupted():
        _remove(partial, out)


def _abandon(partial: _Partial | None, out: Path, *, is_complete: bool) -> str:
    """Remove a temporary directory, except if it has finished blocks.

    Return a sentence that says which files were left behind.
    """
    if partial is None:
        return "Nothing was left behind"
    if not is_complete and finished_blocks(partial.path):
        get_logger(__name__).warning(f"{_finished(partial.path)}. {_BOTH_WAYS}")
        os.close(partial.lock)
        return _finished(partial.path)
    is_elsewhere = not partial.path.is_dir() and os.fstat(partial.lock).st_nlink > 0
    _remove(partial, out)
    if is_elsewhere:
        return f"'{partial.path}' or a directory above it was moved during the run, and the files are in the moved directory"
    return f"'{partial.path}' could not be removed" if partial.path.exists() else "Nothing was left behind"


def _synchronize_name(out: Path) -> None:
    """Wait until the name of the complete output ``out`` is on the disk.

    If the system cannot confirm this, log a warning.
    """
    try:
        sync(out.parent)
    except OSError as error:
        get_logger(__name__).warning(
            f"'{out}' is complete, but the system could not confirm that its name is on the disk ({error.strerror}). If the machine "
            f"fails in the next minute, check that '{out}' still exists."
        )


def _is_of(error: OSError, out: Path) -> bool:
    """Return whether an error concerns the output ``out``, its temporary directory or a directory above.

    The result is also True if the error names no file.
    """
    out = out.absolute()
    names = [Path(os.fsdecode(name)).absolute() for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    inside = {directory for name in names for directory in (name, *name.parents)}
    begins = f".{out.name}."
    is_inside = out in inside or any(d.parent == out.parent and d.name.startswith(begins) and d.suffix == _SUFFIX for d in inside)
    return not names or is_inside or any(name in out.parents for name in names)


def _resolved(out: Path) -> Path:
    """Return ``out``. If it is a link, ``.`` or ``..``, which cannot be renamed, return the resolved path."""
    return out.resolve() if out.is_symlink() or out.name in ("", "..") else out


def finished_blocks(partial: Path) -> int:
    """Return the number of finished blocks in the journal of the temporary directory ``partial``."""
    try:
        lines = (partial / JOURNAL).read_bytes().count(b"\n")
    except OSError:
        return 0
    # If there is no content, the export was renamed, and the process was killed before it removed the other
    # files.
    return max(lines - 1, 0) if (partial / _CONTENT).is_dir() else 0


def refuse_unfinished_run(out: Path, leftover: Leftover = "refuse") -> None:
    """Raise the errors that `building` would raise because of other runs with the same output.

    Do not remove any leftover.

    Raises:
        OutputError: Another process is writing to ``out``. The message names the process.
        ResumeError: A leftover has finished blocks, and ``leftover`` is ``"refuse"``.
    """
    with _leftovers(out := _resolved(out)) as free:
        _choose(free, out, leftover)


def _free_leftover(out: Path, leftover: Leftover) -> _Partial | None:
    """Lock and return the leftover from which this run continues, or return None. Remove all other leftovers.

    If a killed run has moved an earlier export away, move the earlier export back. Log each removal.
    """
    with _leftovers(out) as free:
        chosen = _choose(free, out, leftover)
        for partial in [partial for partial in free if partial is not chosen]:
            free.remove(partial)
            _remove(partial, out)
            get_logger(__name__).info(f"Removed '{partial.path}', left behind by a run to '{out}' that was killed.")
        if chosen is None:
            return None
        _put_back(chosen.path, out)
        _own(chosen.lock)
        free.remove(chosen)
        return chosen


def _choose(free: Iterable[_Partial], out: Path, leftover: Leftover) -> _Partial | None:
    """Return the leftover with the most finished blocks.

    Return None if no leftover has finished blocks, or if ``leftover`` is ``"restart"``. Raise ResumeError if
    a leftover has finished blocks and ``leftover`` is ``"refuse"``.
    """
    most = max(free, key=lambda partial: finished_blocks(partial.path), default=None)
    if most is None or not finished_blocks(most.path) or leftover == "restart":
        return None
    if leftover == "refuse":
        raise ResumeError(f"an earlier run to '{out}' was not completed: {_finished(most.path)}. {_BOTH_WAYS}")
    return most


@contextmanager
def _leftovers(out: Path, own: Path | None = None) -> Iterator[list[_Partial]]:
    """Yield a list of the leftovers of earlier runs with the output ``out``.

    The leftovers are locked inside the ``with`` statement. If the caller removes a leftover from the list,
    this leftover stays locked after the statement, and the caller must unlock it. ``own`` is the temporary
    directory of this process, which is not a leftover.

    Raises:
        OutputError: A temporary directory belongs to a running process.
    """
    free: list[_Partial] = []
    try:
        for path in sorted(out.parent.glob(f".{glob.escape(out.name)}.{'?' * 8}{_SUFFIX}")):
            owner = None if path == own else _locked(path)
            if isinstance(owner, _Partial):
                free.append(owner)
            elif owner is not None:
                raise OutputError(f"{owner} is writing to '{out}' now (in '{path}'). Wait until it has ended, or choose another directory")
        yield free
    finally:
        for partial in free:
            os.close(partial.lock)


def _finished(partial: Path) -> str:
    """Return a clause for a message that says how many finished blocks a temporary directory contains."""
    count = finished_blocks(partial)
    return f"{count} finished block{'s are' if count > 1 else ' is'} in '{partial}'"


def _locked(path: Path) -> _Partial | str | None:
    """Lock a temporary directory and return it.

    If a running process has locked it, return the name of this process, such as ``"process 7"``. Return None
    if the path is not a temporary directory, or if the file system has no locks.
    """
    lock = None if path.is_symlink() else open_own(path / _LOCK)
    if lock is None:
        return None  # not a temporary directory of an export, or no permission
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        # A process writes to its lock file as soon as it has the lock. So if the file is empty, a process is
        # about to lock it.
        if not os.fstat(lock).st_size:
            return None
        try:
            if not try_lock(lock):
                return pread(lock, 100, 0).decode(errors="replace").strip()
        except OSError:  # the file system has no locks
            return None
        stack.pop_all()
    return _Partial(path, lock)


def _new(out: Path) -> _Partial:
    """Create a temporary directory beside ``out``, lock it, and return it."""
    # Since Python 3.12, mkdtemp returns an absolute path; `_leftovers` compares it with paths beside `out`.
    path = out.parent / Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=_SUFFIX, dir=out.parent)).name
    try:
        lock = open_file(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:  # if the directory had no lock file, later runs would not recognize it as a leftover
        path.rmdir()
        raise
    with suppress(OSError):  # some network file systems have no locks, so leftovers stay there
        try_lock(lock)
        _own(lock)
    return _Partial(path, lock)


def _own(lock: int) -> None:
    """Write the name of this process to the lock file with the descriptor ``lock``."""
    text = f"process {os.getpid()}\n".encode()
    write_at(lock, memoryview(text), 0)
    os.ftruncate(lock, len(text))


def _remove(partial: _Partial, out: Path) -> None:
    """Remove a temporary directory.

    If it contains an earlier export and ``out`` does not exist, move the earlier export back to ``out``. The
    lock file is closed and removed last. So if the process is killed before that, the next run recognizes the
    directory as a leftover. The lock file is closed before it is removed, because Windows does not remove
    open files.
    """
    try:
        _put_back(partial.path, out)
        with suppress(OSError):
            (partial.path / JOURNAL).unlink()
        for directory in (partial.path / _CONTENT, partial.path / REPLACED):
            shutil.rmtree(directory, ignore_errors=True)
            if directory.exists():
                return
    finally:
        os.close(partial.lock)
    shutil.rmtree(partial.path, ignore_errors=True)


def _put_back(temporary: Path, out: Path) -> None:
    """Move an earlier export, if any, from a temporary directory back to ``out``, unless ``out`` exists."""
    earlier = temporary / REPLACED
    if earlier.is_dir() and not out.exists():
        earlier.rename(out)


def _synchronize_all(directory: Path) -> None:
    """Wait until the system has written a directory and all files in it to the disk."""
    for path in [*directory.rglob("*"), directory, directory.parent]:
        if not path.is_symlink():
            sync(path)
