"""Files: what Linux, macOS and Windows do differently.

No other module asks what system it runs on, but `quark.base.machine` for memory and processors.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
import sys
from pathlib import Path
from threading import Lock

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_CHUNK = 1 << 24
"""Bytes that are written at once."""
_LOCKED_BYTE = 1 << 30
"""Position of the byte that is locked on Windows: behind the end of the file, since nobody may read it."""


def open_file(path: Path, flags: int, mode: int = 0o777) -> int:
    """Return a descriptor of a file whose bytes are read and written as they are, as `os.open` does."""
    return os.open(path, flags | getattr(os, "O_BINARY", 0), mode)


def open_own(path: Path) -> int | None:
    """Return a descriptor of a file, to read and to write.

    None if it is missing, is a link, or is another user's.
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
    """Lock a file, and return whether that was possible: nobody else has locked it.

    The lock ends when the descriptor is closed, and with the process. Others may read the file meanwhile.

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
    _position = Lock()

    def pread(file: int, length: int, offset: int) -> bytes:
        """Return up to ``length`` bytes of a file from a position on."""
        with _position:
            os.lseek(file, offset, os.SEEK_SET)
            return os.read(file, length)

    def pwrite(file: int, data: bytes | memoryview, offset: int) -> int:
        """Write data at a position of a file, and return how many bytes were written."""
        with _position:
            os.lseek(file, offset, os.SEEK_SET)
            return os.write(file, data)
else:
    pread, pwrite = os.pread, os.pwrite


def read_at(file: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from a position of a file on, and return how many bytes the file had there."""
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
    """Return the content of a file. Raises OSError for what may have no end: a pipe or a device."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path.read_bytes()


def state_of(file: Path | int) -> dict[str, int]:
    """Return what differs, without reading it, where a file or that of a descriptor has been changed."""
    status = os.stat(file)
    return {"bytes": status.st_size, "time of change in ns": status.st_mtime_ns, "inode": status.st_ino}


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``, a part at a time.

    Of several that write to one file, each waits while another writes.
    """
    done = 0
    while done < data.nbytes:
        done += pwrite(file, data[done : done + _CHUNK], offset + done)


def sync_data(file: int) -> None:
    """Wait until the content of an open file is on the disk."""
    getattr(os, "fdatasync", os.fsync)(file)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk.

    Windows does so for files alone, and only for those that may be written to.
    """
    if sys.platform == "win32" and (path.is_dir() or (path.exists() and not os.access(path, os.W_OK))):
        return
    file = open_file(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def allocated_bytes(path: Path) -> int:
    """Return the bytes that a file takes on the disk: its size where the system does not tell more."""
    status = path.stat()
    return 512 * status.st_blocks if hasattr(status, "st_blocks") else status.st_size


def replace_text(path: Path, text: str) -> None:
    """Write a text to a file in one step: a reader sees the earlier file or this one.

    A link of that name is replaced; the file that it points to is not touched.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
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
    """Give a file a second name; its bytes are not copied where the file system can do without."""
    try:
        os.link(path.resolve(), target)
    except OSError:
        shutil.copy2(path, target)


def represent(path: Path, target: Path) -> None:
    """Let ``target`` stand for a file as long as that is there.

    It is a symbolic link, or a second name or a copy, since Windows allows such links to few users.
    """
    try:
        target.symlink_to(path.resolve())
    except OSError:
        link_or_copy(path, target)


def leads_out(path: Path, directory: Path) -> bool:
    """Return whether the file of a name in a directory lies outside it, at the end of one link or several.

    The store of a cache of models counts as inside: ``models--NAME/snapshots/REVISION`` has links to
    ``models--NAME/blobs``. A directory of another form has no store, whatever it is called.
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
    """Rename a directory; an empty directory of its new name gives way.

    Windows refuses while a file in it is open.
    """
    if sys.platform == "win32" and target.is_dir():
        target.rmdir()
    directory.rename(target)


_FROM_WORKING_DIRECTORY = -100  # AT_FDCWD of Linux
_EXCHANGE = 2  # RENAME_EXCHANGE
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two directories of one file system, and return whether this system can do it.

    If not, nothing is changed.

    Linux can, on most of its file systems. Source: ``renameat2(2)``.

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
    """Let the system forget the first bytes of a file that it holds in memory, where it can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)


def release_pages(memory: mmap.mmap) -> None:
    """Take what was read of a mapped file out of memory, where the system can; the file keeps it."""
    if hasattr(memory, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED)
