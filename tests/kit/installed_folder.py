"""A folder of small distributions with dist-info, as an installer writes it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from quark.plugins import Catalog, using

HEADER = """
from quark.plugins import FormatRecord, SchemeRecord, hookimpl
def scheme(name, **more):
    return SchemeRecord(name=name, config="json:dumps", **more)
"""


class LayerMapping:
    """A folder of distributions, to be put on the import path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(
        self, name: str, code: str, *, version: str = "1.0", entry_point: str | None = None, also: str = "", requires: str = ""
    ) -> str:
        """Write a distribution with one module and an entry point for it; return the module's name.

        Args:
            name: Name of the distribution, such as ``"acme-quant"``.
            code: The plugin module, below `HEADER`.
            version: Its version.
            entry_point: Its entry point; the distribution's name by default.
            also: Further lines of ``entry_points.txt``.
            requires: A requirement of the distribution.
        """
        module = f"{name.replace('-', '_')}_{abs(hash(self.path)):x}"
        (self.path / f"{module}.py").write_text(HEADER + dedent(code))
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        required = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
        (info / "entry_points.txt").write_text(f"[quark]\n{entry_point or name} = {module}\n{dedent(also).format(module=module)}")
        (info / "top_level.txt").write_text(f"{module}\n")
        (info / "RECORD").write_text("".join(f"{p.relative_to(self.path)},,\n" for p in [self.path / f"{module}.py", *info.iterdir()]))
        return module

    def collect(self, **environ: str) -> Catalog:
        """Return all plugins of this folder under these environment variables."""
        importlib.invalidate_caches()
        return Catalog.installed([str(self.path)], environ)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LayerMapping]:
    """An importable folder with one working distribution, ``good-quant 2.5`` with the scheme ``good``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    site = LayerMapping(tmp_path)
    site.install("good-quant", "@hookimpl\ndef quark_register_schemes():\n    yield scheme('good')\n", version="2.5")
    before = set(sys.modules)
    with using(Catalog()):  # else a test could make this process's catalog while this folder is on the path
        yield site
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
