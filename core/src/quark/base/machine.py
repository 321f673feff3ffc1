"""Functions that return the memory and the processors of the machine, and the memory of this process. All
sizes are in bytes."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path


def available_bytes() -> int:
    """Return the number of bytes that programs can allocate without swapping."""
    return _memory()[0]


def total_bytes() -> int:
    """Return the number of bytes of memory of the machine."""
    return _memory()[1]


def _memory() -> tuple[int, int]:
    import psutil  # not above: it takes 15 ms, and listings do not need it

    try:
        memory = psutil.virtual_memory()
    except OSError:  # Linux without /proc
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    return int(memory.available), int(memory.total)


def resident_bytes() -> int:
    """Return the resident memory of this process. On Linux without ``/proc``, return the peak instead."""
    import psutil

    try:
        return int(psutil.Process().memory_info().rss)
    except psutil.NoSuchProcess:
        return _highest_bytes()


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had since its start."""
    return max(_highest_bytes(), resident_bytes())  # Linux counts the peak some pages late


def _highest_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cores() -> int:
    """Return the number of processors that this process may use, or of all processors if that is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def return_freed() -> None:
    """Return freed memory of this process to the system with ``malloc_trim`` of glibc.

    Without glibc, do nothing. glibc does not return freed memory that lies between live allocations. Without
    this call, float weights that were replaced would stay resident. The call has a cost, because the system
    clears each returned page before the page is used again. When it was called after each block of a small
    model, it took 5 % of GPTQ's time. `quark.runs.memory.FreedMemory` decides when to call it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
