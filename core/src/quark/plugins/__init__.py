"""The plugin layer: hook specifications, records, discovery, collection, registries. No torch here."""

from quark.plugins.catalog import (
    algorithms,
    catalog,
    documented_modules,
    documented_object,
    emit,
    exporters,
    formats,
    observers,
    schemes,
    templates,
)
from quark.plugins.events import Event
from quark.plugins.hookspecs import hookimpl
from quark.plugins.records import (
    AlgorithmRecord,
    ExporterRecord,
    FormatRecord,
    ObserverRecord,
    Record,
    SchemeRecord,
    TemplateRecord,
)
from quark.plugins.registry import Registry
from quark.plugins.sources import PluginFailure, QuarkPluginWarning, Source

__all__ = [
    "AlgorithmRecord",
    "Event",
    "ExporterRecord",
    "FormatRecord",
    "ObserverRecord",
    "PluginFailure",
    "QuarkPluginWarning",
    "Record",
    "Registry",
    "SchemeRecord",
    "Source",
    "TemplateRecord",
    "algorithms",
    "catalog",
    "documented_modules",
    "documented_object",
    "emit",
    "exporters",
    "formats",
    "hookimpl",
    "observers",
    "schemes",
    "templates",
]
