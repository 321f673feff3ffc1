"""File operations that Linux, macOS and Windows do differently.

Only this module and `quark.base.machine` (memory, processors) ask which system they run on.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
import sys
import threading
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_CHUNK = 1 << 24
"""Number of bytes that are read or written at once."""
_LOCKED_BYTE = 1 << 30
"""Position of the byte that is locked on Windows. It is after the end of the file, because locked bytes
cannot be read."""


def open_file(path: Path, flags: int, mode: int = 0o777) -> int:
    """Open a file in binary mode and return its descriptor, as `os.open` does."""
    return os.open(path, flags | getattr(os, "O_BINARY", 0), mode)


def open_own(path: Path) -> int | None:
    """Open a file for reading and writing, and return its descriptor.

    Return None if the file cannot be opened, is a link, or belongs to another user.
    """
    try:
        file = open_file(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    if path.is_symlink() or (hasattr(os, "geteuid") and os.fstat(file).st_uid != os.geteuid()):
        os.close(file)
        return None
    return file


def try_lock(file: int) -> bool:
    """Lock a file, and return True. Return False if another process has locked the file.

    The lock ends when the descriptor is closed or the process ends. Other processes can still read the file.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        if sys.platform == "win32":
            os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


if sys.platform == "win32":
    _position = threading.Lock()

    def pread(file: int, length: int, offset: int) -> bytes:
        """Return up to ``length`` bytes of a file, starting at the position ``offset``."""
        with _position:
            os.lseek(file, offset, os.SEEK_SET)
            return os.read(file, length)

    def pwrite(file: int, data: bytes | memoryview, offset: int) -> int:
        """Write ``data`` to a file from the position ``offset`` on, and return how many bytes were
        written."""
        with _position:
            os.lseek(file, offset, os.SEEK_SET)
            return os.write(file, data)
else:
    pread, pwrite = os.pread, os.pwrite


def read_at(file: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` with the bytes of a file from ``offset`` on, and return how many bytes were read."""
    done = 0
    while done < buffer.nbytes:
        part = buffer[done : done + _CHUNK]
        if hasattr(os, "preadv"):
            count = os.preadv(file, [part], offset + done)
        else:
            data = pread(file, part.nbytes, offset + done)
            count = len(data)
            part[:count] = data
        if not count:
            break
        done += count
    return done


def regular_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raise OSError for a pipe or a device, because reading it may
    never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def state_of(file: Path | int) -> dict[str, int]:
    """Return the size, the time of the last change and the inode of a file. If the file changes, at least one
    of these values changes."""
    status = os.stat(file)
    return {"bytes": status.st_size, "time of change in ns": status.st_mtime_ns, "inode": status.st_ino}


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``, a part at a time.

    The system lets only one thread at a time write to a file. Because ``data`` is written in parts, other
    threads can write after each part.
    """
    done = 0
    while done < data.nbytes:
        done += pwrite(file, data[done : done + _CHUNK], offset + done)


def sync_data(file: int) -> None:
    """Wait until the system has written the content of an open file to the disk."""
    getattr(os, "fdatasync", os.fsync)(file)


def sync(path: Path) -> None:
    """Wait until the system has written a file, or the names of the files in a directory, to the disk.

    On Windows, this function does nothing for directories and for files that this process may not write.
    """
    if sys.platform == "win32" and (path.is_dir() or (path.exists() and not os.access(path, os.W_OK))):
        return
    file = open_file(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def allocated_bytes(path: Path) -> int:
    """Return how many bytes a file occupies on the disk, or the size of the file if that is unknown."""
    status = path.stat()
    return 512 * status.st_blocks if hasattr(status, "st_blocks") else status.st_size


def replace_text(path: Path, text: str) -> None:
    """Write a text to a file in one step: a reader sees the earlier file or the complete new one.

    If ``path`` is a link, the link is replaced, and the file that the link points to does not change.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    unfinished.unlink(missing_ok=True)  # of a process with the same numbers that was killed
    file = open_file(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            write_at(file, memoryview(text.encode()), 0)
        finally:
            os.close(file)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def link_or_copy(path: Path, target: Path) -> None:
    """Make ``target`` a hard link to the file ``path``, or a copy of the file if the file system has no hard
    links."""
    try:
        os.link(path.resolve(), target)
    except OSError:
        shutil.copy2(path, target)


def represent(path: Path, target: Path) -> None:
    """Make ``target`` a symbolic link to a file.

    If this process may not make symbolic links (most users of Windows may not), make a hard link or a copy
    instead.
    """
    try:
        target.symlink_to(path.resolve())
    except OSError:
        link_or_copy(path, target)


def leads_out(path: Path, directory: Path) -> bool:
    """Return whether links lead from ``path``, which is in ``directory``, to a file outside ``directory``.

    If ``directory`` is a snapshot in a hub cache (``models--NAME/snapshots/REVISION``), its files are links
    to ``models--NAME/blobs``. Such links do not lead outside.
    """
    root = directory.resolve()
    stores = [
        parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots" and parent.parent.name.startswith("models--")
    ]
    places = [root, *stores]
    try:
        return not any(path.resolve().is_relative_to(place) for place in places)
    except (OSError, RuntimeError):  # links that lead to each other
        return True


def move_directory(directory: Path, target: Path) -> None:
    """Rename ``directory`` to ``target``. If ``target`` is an empty directory, it is replaced.

    Windows refuses to rename a directory while a file in it is open.
    """
    if sys.platform == "win32" and target.is_dir():
        target.rmdir()
    directory.rename(target)


_FROM_WORKING_DIRECTORY = -100  # AT_FDCWD of Linux
_EXCHANGE = 2  # RENAME_EXCHANGE
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two directories of one file system, and return True.

    Return False and change nothing if the system cannot do this. Linux can do it on most of its file systems.
    Source: ``renameat2(2)``.

    Raises:
        OSError: A directory is missing, or may not be renamed.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    names = [os.fsencode(path) for path in (one, other)]
    if renameat2(_FROM_WORKING_DIRECTORY, names[0], _FROM_WORKING_DIRECTORY, names[1], _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def release_cached(file: int, size: int) -> None:
    """Drop the first ``size`` bytes of a file from the system's file cache, if the system can do this."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)


def release_pages(memory: mmap.mmap) -> None:
    """Drop the pages of a mapped file from memory, if the system can do this.

    The file itself does not change.
    """
    if hasattr(memory, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED)
