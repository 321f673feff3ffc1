"""Atomic output directories: an export is built in a temporary directory and renamed when it is complete.

The temporary directory is hidden, ``.OUT.xxxxxxxx.partial`` beside OUT, and removed if the export fails. If the process is killed, it stays
until the next run: the process holds a lock on a file in it, which the system releases when the process ends, so that a directory with a
free lock is a leftover. An export that is replaced is exchanged with the new one in one step. Where the file system cannot do that, it is
kept in the temporary directory until the new one has its name, and the next run puts it back if the process was killed in between.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quark.checkpoint.destination import REPLACED, move_into_place, refuse_used_directory
from quark.errors import OutputError
from quark.interrupts import uninterrupted
from quark.log import get_logger

__all__ = ["building", "remove_leftovers"]

_SUFFIX = ".partial"
_LOCK = "owner.lock"
_CONTENT = "checkpoint"
_FIXES = {
    errno.ENOSPC: "there is no space left on the device; free some, or choose another place",
    errno.EDQUOT: "your quota is used up; free some space, or choose another place",
    errno.EACCES: "you may not write there; choose another place",
    errno.EROFS: "the file system is read-only; choose another place",
}


@contextmanager
def building(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory beside ``out``, which is renamed to ``out`` if the body succeeds and removed if it raises.

    A process that is killed leaves the directory behind; so does SIGTERM, unless the program uses
    `quark.interrupts.termination_unwinds`, as ``quark`` does. Leftovers of earlier runs to the same place are removed first.

    Args:
        out: The output directory; see `quark.checkpoint.destination.refuse_used_directory`.
        overwrite: Whether an earlier export there is replaced.

    Raises:
        OutputError: ``out`` is in use, or there is no space or permission to write.
    """
    remove_leftovers(out)
    refuse_used_directory(out, overwrite=overwrite)
    temporary: Path | None = None
    lock = -1
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with uninterrupted():
            temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=_SUFFIX, dir=out.parent))
            lock = _locked(temporary / _LOCK)
        directory = temporary / _CONTENT
        directory.mkdir()
        yield directory
        move_into_place(directory, out, overwrite=overwrite)
    except OSError as error:
        if isinstance(error, OutputError) or error.errno is None:
            raise
        fix = _FIXES.get(error.errno, "choose another place")
        raise OutputError(f"'{out}' could not be written ({error.strerror}): {fix}. Nothing was left behind") from error
    finally:
        # A second Ctrl-C would interrupt the cleanup after the first.
        with uninterrupted():
            if temporary is not None:
                _remove(temporary, out)
            if lock >= 0:
                os.close(lock)


def remove_leftovers(out: Path) -> None:
    """Remove temporary directories of killed runs to ``out``, and log it; those of running processes stay.

    An earlier export that a killed run was about to replace is put back.
    """
    for leftover in sorted(out.parent.glob(f".{glob.escape(out.name)}.{'?' * 8}{_SUFFIX}")):
        try:
            lock = os.open(leftover / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # not a temporary directory of an export, or no permission
        try:
            # The owner writes to its lock file as soon as it has the lock: an empty one is about to be locked.
            status = os.fstat(lock)
            if status.st_size and status.st_uid == os.geteuid() and not leftover.is_symlink():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(leftover, out)
                get_logger(__name__).info(f"Removed '{leftover}', left behind by a run to '{out}' that was killed.")
        except OSError:
            pass  # its owner still runs, or the file system has no locks
        finally:
            os.close(lock)


def _locked(path: Path) -> int:
    """Return the descriptor of a new lock file, open and locked."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(OSError):  # some network file systems have no locks: leftovers stay there
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"process {os.getpid()}\n".encode())
    return lock


def _remove(temporary: Path, out: Path) -> None:
    """Remove a temporary directory, its lock file last: if the process is killed meanwhile, the next run must recognize the leftover.

    An earlier export in it is moved back to ``out`` where nothing has taken its place.
    """
    earlier = temporary / REPLACED
    if earlier.is_dir() and not out.exists():
        earlier.rename(out)
    for directory in (temporary / _CONTENT, earlier):
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists():
            return
    shutil.rmtree(temporary, ignore_errors=True)
