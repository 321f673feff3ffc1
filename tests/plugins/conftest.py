"""Fixtures that make the distribution in this folder visible, as if it were installed."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from quark.plugins import Catalog, Source, using
from quark.plugins.discovery import Candidate, discover

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "src"))


def candidates() -> tuple[Candidate, ...]:
    """The plugins that ``pyproject.toml`` names."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = [EntryPoint(name, module, "quark") for name, module in project["entry-points"]["quark"].items()]
    return tuple(Candidate(Source(project["name"], project["version"], point.value, point.name), point) for point in points)


@pytest.fixture
def third_party() -> Iterator[Catalog]:
    """This process has the installed plugins and the plugins of this folder; a test may add others."""
    yield from _in_use()


@pytest.fixture(scope="module")
def shared_third_party() -> Iterator[Catalog]:
    """The same for all tests of a module, which may add no plugins; listing all plugins takes a tenth of a second."""
    yield from _in_use()


def _in_use() -> Iterator[Catalog]:
    with using(Catalog((*discover(), *candidates()))) as catalog:
        assert catalog.failures() == ()
        yield catalog
