"""The machine and its limits: how fast memory is copied and matrices are multiplied, from a probe of a few tenths of a second."""

from __future__ import annotations

import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["machine", "probe"]

_COPIED = 32 << 20
"""Bytes of the tensor that is copied: more than caches hold."""
_SIDE = 1024
"""Rows and columns of the matrices that are multiplied."""
_ATTEMPTS = 3


@cache
def probe(device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Return the machine's limits as the fastest of a few attempts; measured once in a process.

    Args:
        device: Torch device.
        dtype: Of the matrices: that of the model.

    Returns:
        ``copy_bytes_per_second``: bytes read and written by a copy within memory; ``flops``: floating-point
            operations per second of a
        matrix product.
    """
    source = torch.ones(_COPIED // 4, device=device)
    target = torch.empty_like(source)
    copying = min(_seconds(lambda: target.copy_(source), device) for _ in range(_ATTEMPTS))
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device=device)
    multiplying = min(_seconds(lambda: matrix @ matrix, device) for _ in range(_ATTEMPTS))
    return {"copy_bytes_per_second": 2 * _COPIED / copying, "flops": 2 * _SIDE**3 / multiplying}


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return facts about the machine: processor, cores, threads, memory, device; no name of a host or a user."""
    is_cuda = device.startswith("cuda") and torch.cuda.is_available()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0,
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
    }


def _seconds(work: Any, device: str) -> float:
    started = time.perf_counter()
    work()
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()
    return max(time.perf_counter() - started, 1e-9)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
