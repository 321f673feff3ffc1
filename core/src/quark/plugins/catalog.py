"""Catalog: plugins with their registries, made from given distributions; and the one of this process, made when first asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quark.lazy import LazyRef
from quark.log import get_logger
from quark.plugins import core_plugin
from quark.plugins.collection import Collection
from quark.plugins.discovery import CORE, Candidate, Settings, Source, discover
from quark.plugins.events import Event
from quark.plugins.exports import Exports
from quark.plugins.failures import PluginFailure, warn_once
from quark.plugins.kinds import BUILT_IN, KINDS
from quark.plugins.registry import Registry
from quark.version import VERSION


class Catalog:
    """A set of plugins and what they provide.

    Args:
        candidates: Plugins to use, in order.
        settings: Which of them to leave out, and whether failures are raised.

    Raises:
        PluginError: A plugin failed and ``settings.strict`` is set.
    """

    def __init__(self, candidates: Iterable[Candidate] = (), settings: Settings | None = None) -> None:
        settings = settings or Settings()
        candidates = tuple(candidates)
        self.left_out: dict[Source, str] = {c.source: why for c in candidates if (why := settings.left_out_by(c.source))}
        self._told_of: set[Source] = set()  # listeners that have raised
        self._found = frozenset(c.source.distribution for c in candidates)
        self._collection = Collection(strict=settings.strict)
        self.registries: dict[str, Registry[Any]] = {
            kind.plural: Registry(kind, self._collection.records[kind.plural], self.failures, self.missing) for kind in KINDS
        }
        self.exports = Exports(self.registries, self.failures, self.missing)
        self._collection.add_plugin(core_plugin, Source(CORE, VERSION, core_plugin.__name__, "core"))
        self._collection.add_candidates(c for c in candidates if c.source not in self.left_out)

    @classmethod
    def installed(cls, path: Iterable[str] | None = None, environ: Mapping[str, str] | None = None) -> Catalog:
        """The plugins on ``path`` (``sys.path`` by default), with the settings of ``environ`` (``os.environ`` by default)."""
        return cls(discover(path), Settings.from_environ(os.environ if environ is None else environ))

    def add(self, plugin: object, source: Source) -> None:
        """Add a plugin object that no distribution announces, such as a listener of the running program."""
        self._collection.add_plugin(plugin, source)

    @property
    def modules(self) -> dict[str, dict[str, LazyRef]]:
        """Documented modules that records bring; see `Exports.modules`."""
        return self.exports.modules()

    def documented_names(self) -> list[str]:
        """Documented plain names that records bring, sorted."""
        return self.exports.names()

    def sources(self) -> tuple[Source, ...]:
        """Plugins that were imported and registered."""
        return tuple(self._collection.sources)

    def failures(self) -> tuple[PluginFailure, ...]:
        """What went wrong, in order."""
        return tuple(self._collection.failures)

    def missing(self, distributions: Sequence[str] = BUILT_IN) -> str:
        """Which of these built-in distributions are not here, and what to do about it; empty where all are."""
        absent = [d for d in distributions if d not in self._found]
        said = [f"The built-in ones come with {d}, which is not installed: pip install {d}." for d in absent]
        said += [f"{variable} leaves out {source}." for source, variable in self.left_out.items()]
        return " ".join(said)

    def emit(self, event: Event) -> None:
        """Tell every listener; the first that each raises is logged, the others are forgotten."""
        for source, listener in self._collection.listeners:
            try:
                listener(event)
            except (Exception, SystemExit):
                if source not in self._told_of:
                    self._told_of.add(source)
                    told = "%s raised in quark_on_event for '%s'; this is ignored, and so is what it raises from now on"
                    get_logger().warning(told, source, event.name, exc_info=True)


_lock = threading.RLock()
_current: Catalog | None = None


def catalog() -> Catalog:
    """The plugins of this process; found, imported and warned about on the first call.

    Raises:
        PluginError: A plugin failed and ``QUARK_STRICT_PLUGINS`` is set.
    """
    global _current  # noqa: PLW0603 - the one process-wide cache of plugins
    if _current is None:
        with _lock:
            if _current is None:
                _current = Catalog.installed()
                warn_once(_current.failures())
    return _current


@contextmanager
def using(other: Catalog) -> Iterator[Catalog]:
    """Let another catalog be the one of this process inside a ``with`` block; for tests."""
    global _current  # noqa: PLW0603
    before, _current = _current, other
    try:
        yield other
    finally:
        _current = before
