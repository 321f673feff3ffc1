"""Devices that use kernels, and runs of elements; kernels that are not used cost nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

import quark
from quark.numbers import kernels, quantizer_for
from quark.numbers.kernels import OLDEST_TRITON, VARIABLE, Runs, launching_on, uses_kernels

HAS_TRITON = importlib.util.find_spec("triton") is not None
CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))


def test_gpus_use_kernels_where_there_is_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (uses_kernels(CPU), uses_kernels(META), uses_kernels(CUDA)) == (False, False, HAS_TRITON)


@pytest.fixture(params=[True, False], ids=["with Triton", "without"])
def has_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Return whether Triton seems to be installed."""
    triton = SimpleNamespace(__version__="3.7.0+git1a2b") if request.param else None
    with seen(triton, monkeypatch):
        yield request.param


@contextmanager
def seen(triton: object | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a module as the installed Triton; None simulates that Triton is missing."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: triton)
        patch.setitem(sys.modules, "triton", triton)
        kernels._has_triton.cache_clear()
        yield
    kernels._has_triton.cache_clear()


class Broken(ModuleType):
    """A module whose import fails halfway."""

    def __getattr__(self, name: str) -> object:
        raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("triton", "reason"),
    [
        (SimpleNamespace(__version__="3.3.1"), "Triton 3.3.1 is too old"),
        (SimpleNamespace(__version__="of today"), "cannot be imported"),
        (Broken("triton"), "libcuda"),
    ],
    ids=["old", "unknown", "broken"],
)
def test_without_a_triton_that_compiles_them_torch_rounds_and_the_log_says_so_once(
    triton: object, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "cpu")
    with seen(triton, monkeypatch):
        assert not uses_kernels(CPU)
        assert not uses_kernels(CPU)
        weight = quark.schemes().load_config("int8")().weight
        quantizer_for(weight, activation=False).round_to_nearest(torch.ones(4, 4))
    (line,) = caplog.messages
    assert reason in line
    assert OLDEST_TRITON in line


def test_no_triton_is_looked_for_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_has_triton", lambda: pytest.fail("Triton was looked for"))
    assert not uses_kernels(CPU)


@pytest.mark.parametrize(("named", "used"), [("", ()), ("cpu", ("cpu",)), (" cuda , cpu ", ("cpu", "cuda")), ("xpu", ())])
def test_the_variable_names_the_types_of_devices_that_use_them(
    named: str, used: tuple[str, ...], has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, named)
    assert [d.type for d in (CPU, CUDA) if uses_kernels(d)] == (list(used) if has_triton else [])


def test_what_is_compiled_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_types", lambda named: {"cpu"})
    monkeypatch.setattr(kernels, "_has_triton", lambda: True)
    assert uses_kernels(CPU)
    compiled = torch.compile(lambda x: x + uses_kernels(x.device), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2)).tolist() == [0, 0]


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    with launching_on(CPU):
        pass
    launching_on(torch.device("cuda:1"))
    assert entered == [torch.device("cuda:1")]


def test_rounding_on_the_cpu_imports_no_triton() -> None:
    code = (
        "import sys, torch, quark; from quark.numbers import quantizer_for;"
        "spec = quark.schemes().load_config('int4_wo_32')().weight;"
        "quantizer_for(spec, activation=False).round_to_nearest(torch.randn(4, 64));"
        "print(sorted(name for name in sys.modules if name.startswith(('quark.numbers.kernels.rounding', 'quark_schemes.kernels'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def numbers(runs: Runs, elements: int) -> list[int]:
    """Return the index of each element's scale, as kernels compute it."""
    return [run // runs.span * runs.period + run % runs.period for run in (element // runs.length for element in range(elements))]


@pytest.mark.parametrize(
    ("runs", "expected", "own"),
    [
        (Runs(2), [0, 0, 1, 1, 2, 2, 3, 3], True),
        (Runs(2, period=2, span=2), [0, 0, 1, 1, 2, 2, 3, 3], True),
        (Runs(1, period=2, span=4), [0, 1, 0, 1, 2, 3, 2, 3], False),
        (Runs(8), [0] * 8, True),
    ],
)
def test_runs_have_scales_in_turn(runs: Runs, expected: list[int], own: bool) -> None:
    assert numbers(runs, 8) == expected
    assert runs.have_own_scales is own
