"""Every example that is written passes the conformance suite, with no expected failure."""

from __future__ import annotations

import pytest

from quark.plugins import Catalog
from quark_devkit import Check, find_subject, run_check
from quark_devkit.catalogue import checks_of
from quark_devkit.new_plugin import PluginKind

from .conftest import PLUGINS

CASES = [(kind, check) for kind in PLUGINS for check in checks_of(kind.subject)]


@pytest.mark.slow_runs
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "check"), CASES, ids=[f"{kind.name}-{check.id}" for kind, check in CASES])
def test_the_example_passes(kind: PluginKind, check: Check, installed: Catalog) -> None:
    result = run_check(find_subject(installed, kind.subject, f"lumen_{kind.ending}"), check)
    assert result.outcome in ("passed", "not applicable"), f"{result.message}\n{result.details}"
