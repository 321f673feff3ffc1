"""Simulates Windows for `simulated_system`.

- Modules: ``fcntl``, ``resource`` and others are missing. ``msvcrt`` locks a file with Linux's ``flock``, and
  only behind the end of the file: Windows lets nobody read locked bytes, which this simulation cannot refuse.
- ``os``: names that Windows lacks are missing. A descriptor without ``O_BINARY`` writes ``\\n`` as two bytes. A
  directory cannot be opened, and a read-only descriptor cannot be synchronized. The allocated size is unknown.
- ``open``: text has ``\\r\\n`` unless ``newline`` says otherwise, and is in cp1252 unless ``encoding`` is given.
- Names with one of ``<>:"|?*``, with a dot or a space at the end, or of a device such as ``NUL`` are refused.
- A file that this process has open or mapped, by whatever library, cannot be removed, renamed or replaced.
  Nor can a directory above such a file. A rename replaces no file, and a read-only file cannot be removed.
- There are no symbolic links, no signals beyond C's, no forks, no ``madvise`` and no ``ctypes.CDLL(None)``.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import io
import mmap
import multiprocessing
import os
import re
import resource
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import psutil
from missing_names import MODULES_OF_POSIX, OS_OF_POSIX, SIGNALS_OF_POSIX
from simulated_system import StandIn, asked_by_us, import_as, refuse_proc, replace

_BINARY = 0x8000
_FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f]')
_DEVICE = re.compile(r"(?i)(con|prn|aux|nul|com[1-9¹²³]|lpt[1-9¹²³])(\..*)?")
_LOCK_NOW, _UNLOCK = 2, 0

_open, _fstat, _write, _read, _fsync = os.open, os.fstat, os.write, os.read, os.fsync
_stat, _listdir, _readlink, _open_file = os.stat, os.listdir, os.readlink, io.open


def _refuse_name(path: Any) -> None:
    for part in os.fsdecode(path).split("/"):
        if _FORBIDDEN.search(part) or _DEVICE.fullmatch(part) or (part.strip(".") and part[-1:] in (".", " ")):
            raise OSError(errno.EINVAL, "The filename, directory name, or volume label syntax is incorrect", os.fsdecode(path))


def _held() -> Iterator[str]:
    """Yield the files that this process has open or mapped."""
    for descriptor in _listdir("/proc/self/fd"):
        try:
            yield _readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # the descriptor of the listing itself
    with _open_file("/proc/self/maps", "rb") as maps:
        for line in maps:
            if (start := line.find(b"/")) >= 0:
                yield os.fsdecode(line[start:].rstrip(b"\n"))


def _whole(path: Any, directory: int | None = None) -> str:
    text = os.fsdecode(path)
    if directory is not None:
        text = os.path.join(_readlink(f"/proc/self/fd/{directory}"), text)
    return os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))


def _refuse_held(path: str) -> None:
    below = path + "/"
    for held in _held():
        if held == path or held.startswith(below):
            if stat.S_ISDIR(_mode(held)):
                continue
            raise PermissionError(errno.EACCES, f"The process cannot access the file because it has '{held}' open itself", path)


def _mode(path: str) -> int:
    try:
        return _stat(path).st_mode
    except OSError:
        return 0


def _renaming(plain: Callable[..., Any]) -> Callable[..., Any]:
    def rename(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        if asked_by_us():
            one, other = _whole(source, src_dir_fd), _whole(target, dst_dir_fd)
            _refuse_name(target)
            if os.path.exists(one) and os.path.exists(other) and not os.path.samefile(one, other):
                if plain.__name__ == "rename":
                    raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", other)
                if os.path.isdir(other):
                    raise PermissionError(errno.EACCES, "Access is denied", other)
                _refuse_held(other)
            _refuse_held(one)
        plain(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    return rename


def _removing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        # On Linux, TemporaryFile removes the name of its open file; on Windows it does not.
        if sys._getframe(1).f_code.co_name != "TemporaryFile" and asked_by_us():
            whole = _whole(path, dir_fd)
            if plain.__name__ != "rmdir" and stat.S_ISREG(mode := _mode(whole)) and not mode & stat.S_IWUSR:
                raise PermissionError(errno.EACCES, "Access is denied", whole)
            if plain.__name__ == "rmdir" and f"{os.getcwd()}/".startswith(f"{whole}/"):
                raise PermissionError(errno.EACCES, "The process works in this directory", whole)
            if plain.__name__ != "rmdir":  # rmdir removes only empty directories
                _refuse_held(whole)
        plain(path, dir_fd=dir_fd)

    return remove


def _naming(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that refuses an invalid name for a new file."""

    def named(*paths: Any, **options: Any) -> Any:
        if asked_by_us():
            _refuse_name(paths[-1] if plain.__name__ == "link" else paths[0])
        return plain(*paths, **options)

    return named


def _no_link(plain: Callable[..., Any]) -> Callable[..., Any]:
    def symlink(source: Any, target: Any, *rest: Any, **named: Any) -> None:
        if asked_by_us():
            raise OSError(errno.EINVAL, "A required privilege is not held by the client", os.fsdecode(target))
        plain(source, target, *rest, **named)

    return symlink


class _Status:
    """An ``os.stat_result`` without the fields that Windows lacks."""

    def __init__(self, status: os.stat_result) -> None:
        self._status = status

    def __getattr__(self, name: str) -> Any:
        if name in ("st_blocks", "st_blksize", "st_rdev"):
            raise AttributeError(f"'os.stat_result' object has no attribute '{name}'")
        return 0 if name in ("st_uid", "st_gid") else getattr(self._status, name)

    def __getitem__(self, index: int) -> Any:
        return self._status[index]


def _asking(plain: Callable[..., Any]) -> Callable[..., Any]:
    def status(*arguments: Any, **named: Any) -> Any:
        return _Status(plain(*arguments, **named)) if asked_by_us() else plain(*arguments, **named)

    return status


def _opening(plain: Callable[..., Any]) -> Callable[..., Any]:
    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if asked_by_us():
            if isinstance(file, str | bytes | os.PathLike):
                _refuse_name(file)
            if "b" not in mode and encoding in (None, "locale"):
                encoding = "cp1252"
            if "b" not in mode and "+" not in mode and "r" not in mode and newline is None:
                newline = "\r\n"
        return plain(file, mode, buffering, encoding, errors, newline, closefd, opener)

    return opened


_texts: dict[int, tuple[int, int]] = {}
"""Descriptors that were opened without ``O_BINARY``, and their files."""


def _is_text(file: int) -> bool:
    status = _fstat(file)
    return _texts.get(file) == (status.st_dev, status.st_ino)


def _opened(path: Any, flags: int, mode: int = 0o777) -> int:
    _refuse_name(path)
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))
    file = os.open(path, flags & ~_BINARY, mode)
    status = _fstat(file)
    _texts.pop(file, None)
    if not flags & _BINARY and stat.S_ISREG(status.st_mode):
        _texts[file] = (status.st_dev, status.st_ino)
    return file


def _written(file: int, data: Any) -> int:
    if not _is_text(file):
        return _write(file, data)
    _write(file, bytes(data).replace(b"\n", b"\r\n"))
    return memoryview(data).nbytes


def _taken(file: int, length: int) -> bytes:
    data = _read(file, length)
    return data.replace(b"\r\n", b"\n").partition(b"\x1a")[0] if _is_text(file) else data


def _synchronized(file: Any) -> None:
    number = file if isinstance(file, int) else file.fileno()
    if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    _fsync(number)


def _lock(file: int, mode: int, count: int) -> None:
    if mode == _UNLOCK:
        fcntl.flock(file, fcntl.LOCK_UN)
        return
    assert mode == _LOCK_NOW
    assert count == 1
    if os.lseek(file, 0, os.SEEK_CUR) < _fstat(file).st_size:
        raise NotImplementedError("only locks behind the end of a file are simulated: nobody may read locked bytes")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


class _Mapping(mmap.mmap):
    @property
    def madvise(self) -> Any:
        raise AttributeError("'mmap.mmap' object has no attribute 'madvise'")


class _Memory:
    """Memory figures that psutil has on Windows."""

    def __init__(self, figures: Any) -> None:
        self._figures = figures
        self.peak_wset = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def __getattr__(self, name: str) -> Any:
        return getattr(self._figures, name)


class _Process(psutil.Process):
    def memory_info(self) -> Any:
        return _Memory(super().memory_info())


def _library(name: Any, *rest: Any, **named: Any) -> Any:
    if name is None:
        raise TypeError("argument of type 'NoneType' is not iterable")
    return ctypes.CDLL(name, *rest, **named)


def _context(method: str | None = None) -> Any:
    if method not in (None, "spawn"):
        raise ValueError(f"cannot find context for {method!r}")
    return multiprocessing.get_context("spawn")


def install() -> None:
    """See `simulated_system.install`."""
    locks = ModuleType("msvcrt")
    locks.__dict__.update(locking=_lock, LK_NBLCK=_LOCK_NOW, LK_UNLCK=_UNLOCK)
    own = {"open": _opened, "write": _written, "read": _taken, "fsync": _synchronized, "O_BINARY": _BINARY, "O_TEXT": 0x4000}
    modules = [
        locks,
        StandIn(os, OS_OF_POSIX, own),
        StandIn(psutil, (), {"Process": _Process}),
        StandIn(sys, (), {"platform": "win32"}),
        StandIn(signal, SIGNALS_OF_POSIX),
        StandIn(mmap, {name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))}, {"mmap": _Mapping}),
        StandIn(ctypes, (), {"CDLL": _library}),
        StandIn(multiprocessing, (), {"get_context": _context, "get_all_start_methods": lambda: ["spawn"]}),
    ]
    import_as({module.__name__: module for module in modules}, MODULES_OF_POSIX)
    for name in ("rename", "replace"):
        replace(os, name, _renaming)
    for name in ("remove", "unlink", "rmdir"):
        replace(os, name, _removing)
    for name in ("mkdir", "link"):
        replace(os, name, _naming)
    replace(os, "symlink", _no_link)
    replace(os, "stat", _asking)
    replace(os, "fstat", _asking)
    replace(io, "open", _opening)
    builtins.open = io.open
    refuse_proc()
