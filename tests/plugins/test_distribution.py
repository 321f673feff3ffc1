"""Every module of the package is a plugin that its distribution names, and the other way round."""

from pathlib import Path

from quark.plugins import Catalog

PACKAGE = Path(__file__).resolve().parent / "src" / "third_party"


def test_every_plugin_module_is_registered(third_party: Catalog) -> None:
    plugins = {path.stem for path in PACKAGE.glob("*.py") if "@hookimpl" in path.read_text(encoding="utf-8")}
    assert {source.entry_point for source in third_party.sources() if source.distribution == "third-party"} == plugins
