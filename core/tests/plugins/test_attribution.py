"""Errors name the distribution whose code raised them: a plugin, or the core that a plugin called."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import attrs
import pytest
from greenlet import GreenletExit

from quark.base.interrupts import termination_unwinds
from quark.base.version import VERSION
from quark.errors import PluginError
from quark.plugins import using
from quark.plugins.attribution import attributed, origin
from quark_workbench.cli.main import _print_error
from tests.kit.installed_folder import LayerMapping

PLUGIN = """
import torch

def rounds(core):
    return core()

def fails_below_in_torch(core):
    return torch.zeros(2, 3) @ torch.zeros(2, 3)

def calls_another(core):
    return core(lambda: [][1])

class PanicException(BaseException):
    pass

def raises(error):
    raise error

def panics(core):
    raise PanicException("called `Option::unwrap()` on a `None` value")

@hookimpl
def quark_register_schemes():
    yield scheme('SCHEME')
"""
CORE = """
import attrs
import torch

@attrs.frozen
class Spec:
    bits: int = attrs.field(validator=attrs.validators.gt(0))

def divides():
    return 1 / 0

def fails_below_in_torch():
    return torch.zeros(2, 3) @ torch.zeros(2, 3)

def asserts():
    assert not True, "impossible"

def refuses():
    raise KeyError("no such statistic")

def refuses_below():
    return attrs.evolve(Spec(1), bits=0)

def cannot_use(value):
    return value + 1

def calls(function):
    return function()
"""


@attrs.frozen
class Installed:
    """Two plugins, by their modules, and functions of a module of the core."""

    acme: Any
    other: Any
    core: Any


@pytest.fixture
def installed(site: LayerMapping) -> Iterator[Installed]:
    names = [site.install(f"{name}-quant", PLUGIN.replace("SCHEME", name), version="3.1") for name in ("acme", "other")]
    with using(site.collect()) as catalog:
        assert catalog.failures() == ()
        core = ModuleType("quark.calibration.new")
        exec(compile(CORE, "core/new.py", "exec"), core.__dict__)
        yield Installed(*(importlib.import_module(name) for name in names), core)


def told(call: Callable[[], object]) -> PluginError:
    with pytest.raises(PluginError) as caught, attributed("rounding 'lm_head'"):
        call()
    return caught.value


def test_a_bug_of_a_plugin_is_its_own_also_where_torch_raises_below(installed: Installed) -> None:
    error = told(lambda: installed.acme.fails_below_in_torch(None))
    assert str(error).startswith("plugin 'acme-quant' of acme-quant 3.1")
    assert "raised RuntimeError" in str(error)
    assert "update it (pip install --upgrade acme-quant)" in str(error).lower()
    assert isinstance(error.__cause__, RuntimeError)


@pytest.mark.parametrize("bug", ["divides", "fails_below_in_torch", "asserts"])
def test_a_bug_of_the_core_that_a_plugin_comes_upon_is_not_the_plugins(
    installed: Installed, bug: str, capsys: pytest.CaptureFixture[str]
) -> None:
    inner, outer = attributed("rounding 'lm_head'", origin("schemes", "acme")), attributed("planning the run")
    with pytest.raises((ZeroDivisionError, RuntimeError, AssertionError)) as caught, outer, inner:
        installed.acme.rounds(getattr(installed.core, bug))
    _print_error(caught.value)
    line = " ".join(capsys.readouterr().err.split())
    assert f"Raised by quark-core {VERSION} (core/new.py, line " in line
    assert "called by the scheme 'acme' of plugin 'acme-quant' of acme-quant 3.1" in line
    assert line.endswith("while rounding 'lm_head': it is a bug of quark-core. Run it again with --debug and report it")
    assert "upgrade" not in line


@pytest.mark.parametrize("refusal", ["refuses", "refuses_below"])
def test_what_the_core_refuses_is_said_to_the_plugin_that_asked(installed: Installed, refusal: str) -> None:
    assert "plugin 'acme-quant' of acme-quant 3.1" in str(told(lambda: installed.acme.rounds(getattr(installed.core, refusal))))


def test_what_the_core_cannot_use_is_said_to_the_plugin_that_gave_it(installed: Installed) -> None:
    error = told(lambda: installed.acme.rounds(lambda: installed.core.cannot_use("a text")))
    assert str(error).startswith("plugin 'acme-quant' of acme-quant 3.1")


@pytest.mark.parametrize("whose", ["the plugin's module", "a record"])
def test_what_a_plugin_raises_that_is_no_exception_is_its_own(installed: Installed, whose: str) -> None:
    record = origin("schemes", "acme") if whose == "a record" else None
    with (
        pytest.raises(PluginError, match=r"raised PanicException: called .*lm_head.*[Uu]pdate it") as caught,
        attributed("rounding 'lm_head'", record),
    ):
        installed.acme.panics(None)
    assert str(caught.value).startswith("the scheme 'acme' of plugin" if record else "plugin 'acme-quant' of acme-quant 3.1")
    assert type(caught.value.__cause__).__name__ == "PanicException"


def test_a_plugin_that_exits_is_named(installed: Installed) -> None:
    assert "raised SystemExit: 0" in str(told(lambda: installed.acme.raises(SystemExit(0))))


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, GreenletExit])
def test_what_ends_a_program_or_a_forward_is_not_the_plugins(installed: Installed, error: type[BaseException]) -> None:
    with pytest.raises(error) as caught, attributed("rounding 'lm_head'", origin("schemes", "acme")):
        installed.acme.raises(error())
    assert not getattr(caught.value, "__notes__", None)


def test_a_signal_that_ends_the_program_is_not_the_plugins(installed: Installed) -> None:
    with pytest.raises(SystemExit) as caught, termination_unwinds(), attributed("rounding 'lm_head'", origin("schemes", "acme")):
        installed.acme.rounds(partial(signal.raise_signal, signal.SIGTERM))
    assert caught.value.code == 128 + signal.SIGTERM


def test_the_programs_own_exit_is_not_the_plugins(installed: Installed) -> None:
    with pytest.raises(SystemExit), attributed("rounding 'lm_head'", origin("schemes", "acme")):
        installed.acme.rounds(lambda: sys.exit(3))


def test_a_plugin_that_is_called_back_is_named_with_whom_it_serves(installed: Installed) -> None:
    def serves(function: Callable[[], object]) -> object:
        return installed.other.rounds(lambda: installed.core.calls(lambda: installed.other.fails_below_in_torch(function)))

    with pytest.raises(PluginError) as caught, attributed("rounding 'lm_head'", origin("schemes", "acme")):
        installed.acme.calls_another(serves)
    assert str(caught.value).startswith("plugin 'other-quant' of other-quant 3.1")
    assert "called by the scheme 'acme' of plugin 'acme-quant'" in str(caught.value)


def test_what_the_core_cannot_do_with_a_plugins_answer_is_the_plugins(installed: Installed) -> None:
    tried = attributed("being tried", origin("schemes", "acme"))
    with pytest.raises(PluginError, match="the scheme 'acme' of plugin 'acme-quant'") as caught, tried:
        installed.core.divides()
    assert "update it (pip install --upgrade acme-quant)" in str(caught.value).lower(), "and the fix is for it"


def test_what_is_no_plugins_passes_unchanged(installed: Installed) -> None:
    with pytest.raises(ZeroDivisionError) as caught, attributed("planning the run"):
        installed.core.divides()
    assert not getattr(caught.value, "__notes__", None)
