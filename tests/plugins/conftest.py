"""The distribution in this folder, as if it were installed beside the project's own."""

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
    """Installed plugins and the ones of this folder are the plugins of this process."""
    with using(Catalog((*discover(), *candidates()))) as catalog:
        assert catalog.failures() == ()
        yield catalog
