"""The hook specifications: the manual of what a plugin can register.

A plugin is a module (or object) behind an entry point of the group ``quark``. It marks functions with ``hookimpl``. A provider hook takes no
arguments, is no wrapper, and yields (or returns a list of) records, which point at code by name: yielding one must import nothing heavy. Core
calls every plugin by itself, so one that fails never harms another.

Example:
    >>> from quark.plugins import SchemeRecord, hookimpl
    >>> @hookimpl
    ... def quark_register_schemes():
    ...     yield SchemeRecord(name="acme_int3", summary="INT3 weights", config="acme_quant.schemes:int3")
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from quark.plugins.events import Event
from quark.plugins.records import AlgorithmRecord, ExporterRecord, FormatRecord, ObserverRecord, Record, SchemeRecord, TemplateRecord

PROJECT = "quark"
GROUP = "quark"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class QuarkSpecs:
    """All hooks."""

    @hookspec
    def quark_register_formats(self) -> Iterable[FormatRecord]:
        """Yield number formats: how values become codes, and codes bytes."""
        return ()

    @hookspec
    def quark_register_observers(self) -> Iterable[ObserverRecord]:
        """Yield observers: what of the data decides a tensor's range."""
        return ()

    @hookspec
    def quark_register_schemes(self) -> Iterable[SchemeRecord]:
        """Yield named schemes: which format, granularity and observer each tensor of a layer gets."""
        return ()

    @hookspec
    def quark_register_algorithms(self) -> Iterable[AlgorithmRecord]:
        """Yield algorithms: transforms, which change weights and keep the function, and roundings, which choose codes."""
        return ()

    @hookspec
    def quark_register_templates(self) -> Iterable[TemplateRecord]:
        """Yield model families: where projections, norms and decoder blocks are."""
        return ()

    @hookspec
    def quark_register_exporters(self) -> Iterable[ExporterRecord]:
        """Yield exporters: how a quantized model is written."""
        return ()

    @hookspec
    def quark_on_event(self, event: Event) -> None:
        """Hear of an event. What it raises is logged and never stops a run."""


KINDS: dict[str, type[Record]] = {
    "formats": FormatRecord,
    "observers": ObserverRecord,
    "schemes": SchemeRecord,
    "algorithms": AlgorithmRecord,
    "templates": TemplateRecord,
    "exporters": ExporterRecord,
}
"""Kind of registry → record class; the hook of a kind is ``quark_register_<kind>``."""

EVENT_HOOK = "quark_on_event"
HOOKS = (*(f"quark_register_{kind}" for kind in KINDS), EVENT_HOOK)
