"""Catalog: a set of plugins with their registries, and the one of this process, which is built when it is first asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from quark.base.version import VERSION
from quark.errors import PluginError
from quark.plugins import core_plugin
from quark.plugins.collection import Collection, Registered
from quark.plugins.discovery import CORE, Candidate, Settings, Source, discover
from quark.plugins.exports import Exports
from quark.plugins.failures import PluginFailure, warn_of_unstated, warn_once
from quark.plugins.kinds import BUILT_IN, KINDS, Kind
from quark.plugins.listeners import Listener, Listeners
from quark.plugins.registries import (
    AlgorithmRegistry,
    CommandRegistry,
    DatasetRegistry,
    ExporterRegistry,
    FormatRegistry,
    GraphOpRegistry,
    LayerTypeRegistry,
    MetricRegistry,
    ObserverRegistry,
    SchemeRegistry,
    SelectorRegistry,
    TemplateRegistry,
)
from quark.plugins.registry import Registry

if TYPE_CHECKING:
    from quark.plugins.events import Event

__all__ = ["Catalog", "catalog", "emit", "is_heard", "listening", "using"]


class Catalog:
    """A set of plugins and what they provide.

    Args:
        candidates: Plugins to use, in order.
        settings: Which of them to leave out, and whether failures are raised.

    Attributes:
        is_strict: Whether failures are raised (``QUARK_STRICT_PLUGINS``).

    Raises:
        PluginError: A plugin failed and ``settings.strict`` is set.
    """

    def __init__(self, candidates: Iterable[Candidate] = (), settings: Settings | None = None) -> None:
        settings = settings or Settings()
        candidates = tuple(candidates)
        self.left_out: dict[Source, str] = {c.source: variable for c in candidates if (variable := settings.left_out_by(c.source))}
        self._installed = frozenset(c.source.distribution for c in candidates)
        self._views: dict[object, Catalog] = {}
        self.is_strict = settings.strict
        self._collection = Collection(strict=settings.strict)
        self.formats = FormatRegistry(*self._view("formats"))
        self.observers = ObserverRegistry(*self._view("observers"))
        self.schemes = SchemeRegistry(*self._view("schemes"))
        self.algorithms = AlgorithmRegistry(*self._view("algorithms"))
        self.templates = TemplateRegistry(*self._view("templates"))
        self.exporters = ExporterRegistry(*self._view("exporters"))
        self.selectors = SelectorRegistry(*self._view("selectors"))
        self.layer_types = LayerTypeRegistry(*self._view("layer_types"))
        self.datasets = DatasetRegistry(*self._view("datasets"))
        self.metrics = MetricRegistry(*self._view("metrics"))
        self.graph_ops = GraphOpRegistry(*self._view("graph_ops"))
        self.commands = CommandRegistry(*self._view("commands"))
        self.registries: dict[str, Registry[Any]] = {kind.plural: getattr(self, kind.plural) for kind in KINDS}
        self.exports = Exports(self.registries, self.failures, self.missing)
        self._collection.add_plugin(core_plugin, Source(CORE, VERSION, core_plugin.__name__, "core"))
        self._collection.add_candidates(c for c in candidates if c.source not in self.left_out)

    def _view(self, plural: str) -> tuple[Kind, list[Registered], Callable[[], Sequence[PluginFailure]], Callable[[Sequence[str]], str]]:
        """Return the arguments of the registry of one kind."""
        kind = next(kind for kind in KINDS if kind.plural == plural)
        return kind, self._collection.records[plural], self.failures, self.missing

    @classmethod
    def installed(cls, path: Iterable[str] | None = None, environ: Mapping[str, str] | None = None) -> Catalog:
        """Return the plugins on ``path`` (``sys.path`` by default), with the settings of ``environ`` (``os.environ`` by default)."""
        return cls(discover(path), Settings.from_environ(os.environ if environ is None else environ))

    def add(self, plugin: object, source: Source) -> None:
        """Add a plugin object that no distribution announces, such as a listener of the running program."""
        self._collection.add_plugin(plugin, source)

    def among(self, distributions: Iterable[str]) -> Catalog:
        """Return a catalog of what these distributions and the core bring, without importing anything again; itself where that is all.

        Args:
            distributions: Their normalized names.
        """
        wanted = frozenset(distributions) | {CORE}
        mine = self._collection
        everyone = {entry.source.distribution for entries in mine.records.values() for entry in entries}
        if {*everyone, *(source.distribution for source in (*mine.sources, *self.left_out))} <= wanted:
            return self
        key = (wanted, tuple(len(part) for part in (mine.sources, mine.failures)), tuple(r.revision for r in self.registries.values()))
        if key not in self._views:
            view = self._views[key] = Catalog()
            others = wanted - {CORE}
            view.left_out = {source: variable for source, variable in self.left_out.items() if source.distribution in others}
            view._installed = self._installed & wanted
            for plural, entries in mine.records.items():
                view._collection.records[plural] += [entry for entry in entries if entry.source.distribution in others]
            view._collection.sources += [source for source in mine.sources if source.distribution in others]
            view._collection.failures += [failure for failure in mine.failures if failure.source.distribution in wanted]
            for whose, listener in self.listeners:
                if getattr(whose, "distribution", None) in others:
                    view.listeners.add(whose, listener)
        return self._views[key]

    def sources(self) -> tuple[Source, ...]:
        """Return plugins that were imported and registered."""
        return tuple(self._collection.sources)

    def failures(self) -> tuple[PluginFailure, ...]:
        """Return what went wrong, in order."""
        return tuple(self._collection.failures)

    def unstated(self) -> tuple[Source, ...]:
        """Return plugins that do not say for which version of the plugin API they were written."""
        return tuple(self._collection.unstated)

    def missing(self, distributions: Sequence[str] = BUILT_IN) -> str:
        """Return which of these built-in distributions are not here, and what to do about it; empty where all are."""
        absent = [d for d in distributions if d not in self._installed and d != CORE]
        sentences = [f"The built-in ones come with {d}, which is not installed: pip install {d}." for d in absent]
        sentences += [f"{variable} leaves out {source}." for source, variable in self.left_out.items()]
        return " ".join(sentences)

    @property
    def listeners(self) -> Listeners:
        """The event hooks of the plugins."""
        return self._collection.listeners

    def emit(self, event: Event) -> None:
        """Pass an event to the plugins that listen."""
        self.listeners.emit(event)


_lock = threading.RLock()
_current: Catalog | None = None


def catalog() -> Catalog:
    """Return the plugins of this process; discovered, imported and warned about on the first call.

    Raises:
        PluginError: A plugin failed and ``QUARK_STRICT_PLUGINS`` is set.
    """
    global _current  # noqa: PLW0603 - the one process-wide cache of plugins
    if _current is None:
        with _lock:
            if _current is None:
                _current = Catalog.installed()
                warn_once(_current.failures())
                warn_of_unstated(_current.unstated())
    return _current


def recorded_catalog() -> Catalog:
    """Return the plugins of this process.

    A failure is recorded in strict mode too: for what has to work beside a broken plugin.
    """
    try:
        return catalog()
    except PluginError:
        return Catalog(discover(), attrs.evolve(Settings.from_environ(os.environ), strict=False))


@contextmanager
def using(other: Catalog) -> Iterator[Catalog]:
    """Let another catalog be the one of this process inside a ``with`` block; for tests."""
    global _current  # noqa: PLW0603
    before, _current = _current, other
    try:
        yield other
    finally:
        _current = before


_program = Listeners()
"""Listeners of the running program, beside those of plugins."""


@contextmanager
def listening(listener: Listener, name: str = "a listener") -> Iterator[None]:
    """Let a function hear the events of the runs inside a ``with`` block.

    Args:
        listener: Is called with each `Event`, in the thread that works, between two pieces of work.
        name: Whose it is, for the message where it raises.

    Example:
        >>> from quark.plugins import RunFinished, emit, listening
        >>> with listening(lambda event: print(event.name)):
        ...     emit(RunFinished(task="quantize", elapsed=3.5))
        run_finished
    """
    _program.add(name, listener)
    try:
        yield
    finally:
        _program.remove(listener)


def is_heard() -> bool:
    """Return whether anybody listens."""
    return bool(_program) or bool(catalog().listeners)


def emit(event: Event) -> None:
    """Pass an event to the listeners of the program, then to the plugins of this process; none can do harm."""
    _program.emit(event)
    catalog().emit(event)
