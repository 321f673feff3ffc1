"""Devices that use kernels, and runs of elements; nothing is paid for kernels that are not used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from quark.numbers import kernels
from quark.numbers.kernels import VARIABLE, Runs, launching_on, uses_kernels

HAS_TRITON = importlib.util.find_spec("triton") is not None
CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))


def test_gpus_use_kernels_where_there_is_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (uses_kernels(CPU), uses_kernels(META), uses_kernels(CUDA)) == (False, False, HAS_TRITON)


@pytest.fixture(params=[True, False], ids=["with Triton", "without"])
def has_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether Triton seems to be installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if request.param else None)
    kernels._types.cache_clear()
    yield request.param
    kernels._types.cache_clear()


@pytest.mark.parametrize(("named", "used"), [("", ()), ("cpu", ("cpu",)), (" cuda , cpu ", ("cpu", "cuda")), ("xpu", ())])
def test_the_variable_names_the_types_of_devices_that_use_them(
    named: str, used: tuple[str, ...], has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, named)
    assert [d.type for d in (CPU, CUDA) if uses_kernels(d)] == (list(used) if has_triton else [])


def test_what_is_compiled_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_types", lambda named: {"cpu"})
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
    """The number of the scale of each element, as kernels find it."""
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
