"""Distributions that `quark new-plugin` writes, used from their source folders."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from quark.plugins import Catalog, Source, using
from quark.plugins.discovery import Candidate, discover
from quark_devkit.new_plugin import PLUGIN_KINDS, new_distribution

NAME = "lumen-quant"
KINDS = [kind.name for kind in PLUGIN_KINDS]
PLUGINS = [plugin for kind in PLUGIN_KINDS for plugin in kind.plugins]
"""All kinds and their companions: a generated distribution has one record of each."""


def candidates(directory: Path) -> tuple[Candidate, ...]:
    """The plugins that the ``pyproject.toml`` of a distribution names."""
    project = tomllib.loads((directory / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = [EntryPoint(name, module, "quark") for name, module in project["entry-points"]["quark"].items()]
    return tuple(Candidate(Source(project["name"], project["version"], point.value, point.name), point) for point in points)


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distribution with a plugin of every kind."""
    return new_distribution(NAME, KINDS, tmp_path_factory.mktemp("new") / NAME)


@pytest.fixture
def installed(everything: Path) -> Iterator[Catalog]:
    """It is one of the plugins of this process."""
    source = str(everything / "src")
    sys.path.insert(0, source)
    try:
        with using(Catalog((*discover(), *candidates(everything)))) as catalog:
            assert catalog.failures() == ()
            yield catalog
    finally:
        sys.path.remove(source)
