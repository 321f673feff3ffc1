"""Exchange of two directories in one step, so that other processes, and a crash, find the one or the other."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

__all__ = ["exchange"]

_FROM_WORKING_DIRECTORY = -100  # AT_FDCWD of Linux
_EXCHANGE = 2  # RENAME_EXCHANGE
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two directories of one file system, and return whether this system can do it; if not, nothing is changed.

    Linux can, on most of its file systems. Source: ``renameat2(2)``.

    Raises:
        OSError: A directory is missing, or may not be renamed.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = [os.fsencode(path) for path in (one, other)]
    if renameat2(_FROM_WORKING_DIRECTORY, names[0], _FROM_WORKING_DIRECTORY, names[1], _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
