"""A short measurement of this machine: matrix products, copies, reading of a disk, and the roundings of one run on small weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import RoundingTask
from quark.errors import QuarkError
from quark.modules import quantized_class
from quark.planning.plan_row import PlanRow
from quark.quantizers import quantizer_for
from quark.runs.run import Run

__all__ = ["Machine", "probe"]

_SECONDS = 0.15
"""Longest time of one measurement; the first result counts where one takes longer."""
_SIDE = 1024
_ELEMENTS = 1 << 20
_COPIED, _READ = 1 << 26, 1 << 26
_MOST_SPECS = 4


@attrs.frozen
class Machine:
    """Rates of one machine, measured by `probe`.

    Attributes:
        products: FLOPs a second of matrix products in the model's dtype.
        products32: The same in float32.
        copied: Bytes a second that are copied in memory: read once and written once.
        read: Bytes a second of the checkpoint's disk; that of a copy where there is no file to read.
        rounded: Seconds for one element that is rounded to nearest and packed, the mean of the plan's specs.
        solved: Seconds of the run's rounding for one unit of ``K³ / 3 + 2 N K²``; None where the run has none.
    """

    products: float
    products32: float
    copied: float
    read: float
    rounded: float
    solved: float | None = None


def probe(run: Run, device: torch.device, dtype: torch.dtype, file: Path | None) -> Machine:
    """Measure this machine for a run, in less than two seconds on an idle one.

    Args:
        run: Its weight specs and its rounding are measured.
        device: Where the run will work.
        dtype: Of the model.
        file: A file of the checkpoint, of which at most 64 MiB are read; None where there is none.
    """
    copied = _copied(device)
    rows = {id(r.config): r for r in run.plan.quantized if r.has_quantized_weight}
    return Machine(
        products=_products(device, dtype),
        products32=_products(device, torch.float32),
        copied=copied,
        read=copied if file is None else _read(file),
        rounded=_rounded(list(rows.values())[:_MOST_SPECS], device, dtype),
        solved=_solved(run, device, dtype),
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of a few runs, the first of which warms up."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 2 or (len(times) < 5 and time.perf_counter() - begin < _SECONDS):
        started = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        times.append(time.perf_counter() - started)
        if times[0] > _SECONDS:
            break
    return max(min(times), 1e-9)


def _products(device: torch.device, dtype: torch.dtype) -> float:
    a, b = _random(_SIDE // 4, _SIDE, device, dtype), _random(_SIDE, _SIDE, device, dtype)
    return 2 * a.numel() * _SIDE / _seconds(lambda: a @ b, device)


def _copied(device: torch.device) -> float:
    a = torch.empty(_COPIED, dtype=torch.uint8, device=device).zero_()
    b = torch.empty_like(a)
    return _COPIED / _seconds(lambda: b.copy_(a), device)


def _read(file: Path) -> float:
    """Read part of a file, from the disk where the system lets its cached pages go."""
    try:
        with file.open("rb", buffering=0) as opened:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(opened.fileno(), 0, _READ, os.POSIX_FADV_DONTNEED)
            started, size = time.perf_counter(), 0
            while size < _READ and (part := opened.read(1 << 22)) and time.perf_counter() - started < 3 * _SECONDS:
                size += len(part)
            return max(size, 1) / max(time.perf_counter() - started, 1e-9)
    except OSError:
        return 1e9


def _random(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return random numbers of a generator of its own: the program's stays as it is."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _sample(row: PlanRow, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return random weights of at most that size for a layer."""
    return _random(min(rows, row.shape[0]), min(columns, row.shape[1]), device, dtype)


def _rounded(rows: list[PlanRow], device: torch.device, dtype: torch.dtype) -> float:
    seconds, elements = 0.0, 0
    for row in rows:
        if len(row.shape) != 2:
            continue
        quantizer: Any = quantizer_for(row.quantized_to.weight, activation=False)  # type: ignore[arg-type]
        weight = _sample(row, max(16, _ELEMENTS // row.shape[1]), row.shape[1], device, dtype)
        if quantizer.shape_error(tuple(weight.shape)) is not None:
            continue

        def work(quantizer: Any = quantizer, weight: Tensor = weight) -> None:
            values, qparams = quantizer.round_to_nearest(weight)
            quantizer.pack(quantizer.codes_of(values, qparams), qparams, order="reorder")

        with torch.no_grad():
            seconds += _seconds(work, device)
        elements += weight.numel()
    return seconds / elements if elements else 0.0


def _solved(run: Run, device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the seconds of the run's rounding for one unit of work, on a small layer with random inputs."""
    rounding = run.algorithms.rounding
    row = next((r for r in run.plan.rows if r.algorithm), None)
    if row is None or not rounding.needs:
        return None
    weight = _sample(row, 512, 512, device, dtype)
    rows, columns = weight.shape
    if quantizer_for(row.quantized_to.weight, activation=False).shape_error((rows, columns)) is not None:  # type: ignore[arg-type]
        return None
    x = _random(2 * columns, columns, device, dtype)
    statistics: Mapping[Any, Any] = {kind: kind(columns, device) for kind in rounding.needs}
    for statistic in statistics.values():
        statistic.update(x, x if statistic.wants_float else None)

    def work() -> None:
        layer = nn.Linear(columns, rows, bias=False, device="meta", dtype=dtype)
        layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
        quantized = quantized_class(layer).from_float(layer, row.quantized_to)
        rounding.round(RoundingTask({row.name: quantized}, statistics))

    try:
        with torch.no_grad():
            return _seconds(work, device) / (columns**3 / 3 + 2 * rows * columns**2)
    except QuarkError:  # the run says so with the layer's name
        return None
