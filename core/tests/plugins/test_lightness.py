"""Imports stay light: ``import quark`` imports no plugin machinery, and no listing imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import quark
from quark.base.version import VERSION


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"], capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


def test_importing_quark_imports_no_plugin_machinery() -> None:
    loaded = modules_after("import quark")
    assert "quark" in loaded
    assert not loaded & {"pluggy", "importlib_metadata", "attr", "torch", "quark.plugins"}


@pytest.mark.parametrize("kind", ["formats", "observers", "schemes", "algorithms", "templates", "exporters"])
def test_listing_in_python_imports_no_torch(kind: str) -> None:
    loaded = modules_after(f"import quark\nfor name in quark.{kind}().names(): quark.{kind}().get(name)")
    assert "quark.plugins.registry" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "rich", "typer"}


def test_the_version_is_the_one_of_all_distributions() -> None:
    assert quark.__version__ == VERSION
