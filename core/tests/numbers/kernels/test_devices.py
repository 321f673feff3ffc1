"""Which devices use kernels, and that nothing is paid for them where they are not used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from quark.numbers.kernels import VARIABLE, devices, uses_kernels
from quark.numbers.kernels.devices import launching_on

HAS_TRITON = importlib.util.find_spec("triton") is not None
CPU, CUDA, META = (torch.device(name) for name in ("cpu", "cuda", "meta"))


def test_gpus_use_kernels_where_there_is_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert (uses_kernels(CPU), uses_kernels(META), uses_kernels(CUDA)) == (False, False, HAS_TRITON)


@pytest.fixture(params=[True, False], ids=["with Triton", "without"])
def has_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether Triton seems to be installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if request.param else None)
    devices._types.cache_clear()
    yield request.param
    devices._types.cache_clear()


@pytest.mark.parametrize(("named", "used"), [("", ()), ("cpu", ("cpu",)), (" cuda , cpu ", ("cpu", "cuda")), ("xpu", ())])
def test_the_variable_names_the_types_of_devices_that_use_them(
    named: str, used: tuple[str, ...], has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, named)
    assert [d.type for d in (CPU, CUDA) if uses_kernels(d)] == (list(used) if has_triton else [])


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
