"""Build an export in a temporary directory and rename it into place: a failed export leaves nothing, a killed one until the next run.

The export is built in a hidden directory ``.OUT.xxxxxxxx.partial`` beside OUT. A lock file in it is held by the
process that builds, and released by the system however that process ends: a directory whose lock is free is a leftover.
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

from quark.checkpoint.destination import move_into_place, refuse_used_directory
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
    """A temporary directory beside ``out``, renamed to it when the body ends well and removed when it does not.

    A process that is killed leaves the directory behind; so does SIGTERM, unless the program asks for
    `quark.interrupts.termination_unwinds`, as ``quark`` does. Leftovers of earlier runs to the same place are removed first.

    Args:
        out: Where to; see `quark.checkpoint.destination.refuse_used_directory`.
        overwrite: Whether an earlier export there is replaced.

    Raises:
        OutputError: ``out`` is in use, or writing fails for want of space or rights.
    """
    refuse_used_directory(out, overwrite=overwrite)
    temporary: Path | None = None
    lock = -1
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out)
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
        # A second Ctrl-C would stop the cleaning up after the first.
        with uninterrupted():
            if temporary is not None:
                _remove(temporary)
            if lock >= 0:
                os.close(lock)


def remove_leftovers(out: Path) -> None:
    """Remove what runs to ``out`` have left behind when they were killed, and say so; what a live process builds is not touched."""
    for leftover in sorted(out.parent.glob(f".{glob.escape(out.name)}.{'?' * 8}{_SUFFIX}")):
        try:
            lock = os.open(leftover / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # not made here, or not ours
        try:
            # The owner writes to its lock file as soon as it has the lock: an empty one is about to be locked.
            status = os.fstat(lock)
            if status.st_size and status.st_uid == os.geteuid() and not leftover.is_symlink():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(leftover)
                get_logger(__name__).info(f"Removed '{leftover}', left behind by a run to '{out}' that was killed.")
        except OSError:
            pass  # its owner lives, or the file system has no locks
        finally:
            os.close(lock)


def _locked(path: Path) -> int:
    """A new lock file, open and locked."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(OSError):  # some network file systems have no locks: what is left there stays
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"process {os.getpid()}\n".encode())
    return lock


def _remove(temporary: Path) -> None:
    """Remove a temporary directory, its lock last: one that is killed here must be known to the next run."""
    shutil.rmtree(temporary / _CONTENT, ignore_errors=True)
    if not (temporary / _CONTENT).exists():
        shutil.rmtree(temporary, ignore_errors=True)
