"""macOS, as far as `simulated_system` goes: some functions of Linux are missing, and the peak of memory is in bytes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import sys
from typing import Any

from simulated_system import StandIn, import_as, refuse_proc

_OF_LINUX = ("fdatasync", "posix_fadvise", "posix_fallocate", "O_TMPFILE", "O_DIRECT", "O_PATH", "memfd_create", "eventfd", "pidfd_open")
_OF_LINUX += ("copy_file_range", "splice", "getrandom", "sched_getaffinity", "sched_setaffinity", "getxattr", "setxattr", "listxattr")
_OF_GLIBC = ("renameat2", "malloc_trim")


class _Library:
    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        if name in _OF_GLIBC:
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return getattr(self._library, name)


def _library(name: Any, *rest: Any, **named: Any) -> Any:
    library = ctypes.CDLL(name, *rest, **named)
    return library if name is not None else _Library(library)


def _used(who: int) -> Any:
    used = list(resource.getrusage(who))
    used[2] *= 1024  # ru_maxrss
    return resource.struct_rusage(used)


def install() -> None:
    """See `simulated_system.install`."""
    modules = [
        StandIn(os, [*_OF_LINUX, *(name for name in dir(os) if name.startswith("POSIX_FADV_"))]),
        StandIn(sys, (), {"platform": "darwin"}),
        StandIn(ctypes, (), {"CDLL": _library}),
        StandIn(resource, (), {"getrusage": _used}),
        StandIn(multiprocessing),
    ]
    import_as({module.__name__: module for module in modules}, ())
    refuse_proc()
