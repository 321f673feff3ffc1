"""Work in a fresh process does not see the state of this one, and has its plugins."""

from __future__ import annotations

import os

import pytest

from quark.base.lazy import ObjectRef
from quark.errors import ConfigError
from quark.plugins import Catalog, SchemeRecord, Source, hookimpl, schemes, using
from quark.plugins.discovery import discover
from quark_devkit.check import NotApplicableError
from quark_devkit.fresh_process import in_fresh_process

_SEEN: list[int] = []


def seen_before(number: int) -> list[int]:
    before = list(_SEEN)
    _SEEN.append(number)
    return before


def plain() -> None:
    """A scheme, as far as listings go."""


def registered() -> list[str]:
    return list(schemes().names())


def failing() -> None:
    raise ConfigError("it does not work")


def catalog_with(build: object) -> Catalog:
    class Plugin:
        @hookimpl
        def quark_register_schemes(self) -> list[SchemeRecord]:
            return [SchemeRecord(name="of_the_program", config=ObjectRef(build))]

    catalog = Catalog(discover())
    catalog.add(Plugin(), Source("acme-quant", "0.1"))
    return catalog


def test_nothing_has_been_run_in_it_and_nothing_comes_back() -> None:
    seen_before(0)
    assert [in_fresh_process(seen_before, number) for number in (1, 2)] == [[], []]
    assert _SEEN == [0]
    assert in_fresh_process(os.getpid) != os.getpid()


def test_it_has_the_plugins_of_this_one_also_those_that_a_program_adds() -> None:
    with using(catalog_with(plain)):
        assert in_fresh_process(registered) == registered()
        assert "of_the_program" in registered()


def test_what_cannot_be_taken_there_is_said() -> None:
    with using(catalog_with(lambda: None)), pytest.raises(NotApplicableError, match="cannot be sent to another process"):
        in_fresh_process(registered)


def test_its_error_is_that_of_the_work() -> None:
    with pytest.raises(ConfigError, match="it does not work"):
        in_fresh_process(failing)
