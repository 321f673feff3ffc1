"""Catalog: all registries of one set of plugins, the documented names they export, and the process-wide instance."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, cast

from quark.errors import AmbiguousNameError, UnknownNameError
from quark.lazy import LazyRef
from quark.plugins.collection import Collected, collect
from quark.plugins.discovery import discover
from quark.plugins.events import Event
from quark.plugins.hookspecs import KINDS
from quark.plugins.records import AlgorithmRecord, ExporterRecord, FormatRecord, ObserverRecord, SchemeRecord, TemplateRecord
from quark.plugins.registry import Registry
from quark.plugins.sources import PluginFailure, Source


class Catalog:
    """What a set of plugins registered.

    Args:
        collected: From `quark.plugins.collection.collect`.
    """

    def __init__(self, collected: Collected) -> None:
        self.registries: dict[str, Registry[Any]] = {
            kind: Registry(kind, collected.registrations[kind], collected.failures) for kind in KINDS
        }
        self.failures: list[PluginFailure] = collected.failures
        self.sources: list[Source] = collected.sources
        self._listeners = collected.listeners
        self._exports: dict[str, list[tuple[LazyRef, Source]]] = {}
        for registrations in collected.registrations.values():
            for registration in registrations:
                for key, reference in registration.record.exports.items():
                    self._exports.setdefault(key.rpartition(":")[2], []).append((reference, registration.source))
        self.modules: dict[str, dict[str, LazyRef]] = {}
        for registrations in collected.registrations.values():
            for registration in registrations:
                for key, reference in registration.record.exports.items():
                    module, separator, name = key.rpartition(":")
                    if separator:
                        self.modules.setdefault(module, {})[name] = reference

    def documented_object(self, name: str) -> Any:
        """The object behind a documented name that some record exports.

        Raises:
            UnknownNameError: No record does.
            AmbiguousNameError: Records of several distributions export different things under it.
        """
        found = self._exports.get(name, [])
        if not found:
            raise UnknownNameError(f"no installed plugin exports '{name}'", kind="exports", name=name, known=sorted(self._exports))
        if len({reference for reference, _ in found}) > 1:
            claims = " and ".join(sorted({f"{source} ({reference})" for reference, source in found}))
            raise AmbiguousNameError(f"the documented name '{name}' is exported by {claims}: uninstall or disable one of them")
        return found[0][0].load()

    def documented_names(self) -> list[str]:
        """All documented names that records export."""
        return sorted(self._exports)

    def emit(self, event: Event) -> None:
        """Tell every listener; what one raises is logged and goes no further."""
        for listener, source in self._listeners:
            try:
                listener(event)
            except Exception:  # anyone's code may raise anything, and none of it may end a run
                logging.getLogger("quark.plugins").exception("the listener of %s failed on event '%s'", source, event.name)


@cache
def catalog() -> Catalog:
    """The plugins installed in this environment, collected once in a process; ``catalog.cache_clear()`` looks anew."""
    return Catalog(collect(discover()))


def formats() -> Registry[FormatRecord]:
    """Number formats."""
    return cast("Registry[FormatRecord]", catalog().registries["formats"])


def observers() -> Registry[ObserverRecord]:
    """Observers."""
    return cast("Registry[ObserverRecord]", catalog().registries["observers"])


def schemes() -> Registry[SchemeRecord]:
    """Named schemes."""
    return cast("Registry[SchemeRecord]", catalog().registries["schemes"])


def algorithms() -> Registry[AlgorithmRecord]:
    """Algorithms."""
    return cast("Registry[AlgorithmRecord]", catalog().registries["algorithms"])


def templates() -> Registry[TemplateRecord]:
    """Model families."""
    return cast("Registry[TemplateRecord]", catalog().registries["templates"])


def exporters() -> Registry[ExporterRecord]:
    """Exporters."""
    return cast("Registry[ExporterRecord]", catalog().registries["exporters"])


def documented_object(name: str) -> Any:
    """As `Catalog.documented_object`, of the installed plugins."""
    return catalog().documented_object(name)


def documented_modules() -> dict[str, dict[str, LazyRef]]:
    """Documented modules that belong to plugins: module → name → reference."""
    return catalog().modules


def emit(event: Event) -> None:
    """Tell the installed plugins of an event."""
    catalog().emit(event)
