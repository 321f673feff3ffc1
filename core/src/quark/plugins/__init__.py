"""The plugin layer: hooks, records, and registries of what installed plugins provide.

A plugin author needs `hookimpl`, the record classes, and the manual in `quark.plugins.hookspecs`. Everyone else asks a registry:
``schemes().get("fp8")``.
"""

from __future__ import annotations

from typing import Any

from quark.lazy import LazyRef
from quark.plugins.catalog import Catalog, using
from quark.plugins.catalog import catalog as _catalog
from quark.plugins.discovery import Source
from quark.plugins.events import Event
from quark.plugins.failures import PluginFailure, PluginWarning
from quark.plugins.hookspecs import QuarkHooks, hookimpl
from quark.plugins.records import (
    AlgorithmRecord,
    ExporterRecord,
    FormatRecord,
    LayerTypeRecord,
    ObserverRecord,
    Record,
    SchemeRecord,
    TemplateRecord,
)
from quark.plugins.registry import Registry

__all__ = [
    "AlgorithmRecord",
    "Catalog",
    "Event",
    "ExporterRecord",
    "FormatRecord",
    "LayerTypeRecord",
    "LazyRef",
    "ObserverRecord",
    "PluginFailure",
    "PluginWarning",
    "QuarkHooks",
    "Record",
    "Registry",
    "SchemeRecord",
    "Source",
    "TemplateRecord",
    "algorithms",
    "documented_modules",
    "documented_names",
    "documented_object",
    "emit",
    "exporters",
    "formats",
    "hookimpl",
    "layer_types",
    "observers",
    "schemes",
    "templates",
    "using",
]


def formats() -> Registry[FormatRecord]:
    """All number formats."""
    return _catalog().registries["formats"]


def observers() -> Registry[ObserverRecord]:
    """All observers."""
    return _catalog().registries["observers"]


def schemes() -> Registry[SchemeRecord]:
    """All schemes."""
    return _catalog().registries["schemes"]


def algorithms() -> Registry[AlgorithmRecord]:
    """All algorithms."""
    return _catalog().registries["algorithms"]


def templates() -> Registry[TemplateRecord]:
    """All model families."""
    return _catalog().registries["templates"]


def exporters() -> Registry[ExporterRecord]:
    """All exporters."""
    return _catalog().registries["exporters"]


def layer_types() -> Registry[LayerTypeRecord]:
    """All layer types."""
    return _catalog().registries["layer_types"]


def documented_object(name: str) -> Any:
    """The object that a plugin brings under a documented name; see `quark.plugins.exports.Exports.load`."""
    return _catalog().exports.load(name)


def documented_names() -> list[str]:
    """All documented plain names that plugins bring, sorted."""
    return _catalog().exports.names()


def documented_modules() -> dict[str, dict[str, LazyRef]]:
    """Documented modules that plugins bring: module → name → reference."""
    return _catalog().exports.modules()


def emit(event: Event) -> None:
    """Tell every plugin that listens what happened."""
    _catalog().emit(event)
