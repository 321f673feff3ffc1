"""Simulates macOS for `simulated_system`: some functions of Linux are missing, and peak memory is in bytes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import sys
from typing import Any

from missing_names import C_OF_LINUX, OS_OF_LINUX
from simulated_system import StandIn, import_as, refuse_proc


class _Library:
    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        if name in C_OF_LINUX:
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
        StandIn(os, OS_OF_LINUX),
        StandIn(sys, (), {"platform": "darwin"}),
        StandIn(ctypes, (), {"CDLL": _library}),
        StandIn(resource, (), {"getrusage": _used}),
        StandIn(multiprocessing),
    ]
    import_as({module.__name__: module for module in modules}, ())
    refuse_proc()
