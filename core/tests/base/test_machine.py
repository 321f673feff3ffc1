"""Figures of the machine equal the figures of its operating system."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from quark.base import machine


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="the system tells it so on Linux")
def test_memory_is_what_the_system_says() -> None:
    def of(file: str, name: str) -> int:
        lines = Path("/proc", file).read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

    assert machine.resident_bytes() == pytest.approx(of("self/status", "VmRSS"), rel=0.1)
    assert machine.peak_bytes() == pytest.approx(of("self/status", "VmHWM"), rel=0.1)
    assert machine.total_bytes() == of("meminfo", "MemTotal")
    assert machine.available_bytes() == pytest.approx(of("meminfo", "MemAvailable"), rel=0.2)
    assert machine.processor()


def test_memory_and_processors_are_told_on_every_system() -> None:
    assert 1 << 20 < machine.resident_bytes() < machine.total_bytes()
    assert 0 < machine.available_bytes() < machine.total_bytes()
    assert machine.cores() >= 1
    assert isinstance(machine.processor(), str)
    machine.return_freed()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have none")
def test_memory_is_told_without_the_file_system_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    total, peak = machine.total_bytes(), machine.peak_bytes()

    def missing(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    def unknown(*_: object) -> None:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil, "virtual_memory", missing)
    monkeypatch.setattr(psutil, "Process", unknown)
    assert machine.total_bytes() == total
    assert 0 < machine.available_bytes() < total
    assert machine.resident_bytes() == machine.peak_bytes() == pytest.approx(peak, rel=0.1)
