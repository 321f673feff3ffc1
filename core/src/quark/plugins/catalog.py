"""Catalog: a set of plugins with their registries; this process builds its own on first use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from quark.base.lazy import Reference
from quark.base.version import VERSION
from quark.errors import AmbiguousNameError, PluginError, UnknownNameError
from quark.plugins import core_plugin, registries
from quark.plugins.api_version import ApiRange
from quark.plugins.collection import EVENT_HOOK, Collection, Listener, Listeners
from quark.plugins.discovery import CORE, Candidate, Settings, Source, discover
from quark.plugins.failures import PluginFailure, warn_of_unstated, warn_once
from quark.plugins.registries import BUILT_IN, KINDS
from quark.plugins.registry import Registered, Registry, load_for, not_there, unreplaced

if TYPE_CHECKING:
    from quark.plugins.events import Event
    from quark.plugins.measuring import Moment


@attrs.frozen
class Exports:
    """The exports of all records of a catalog."""

    catalog: Catalog

    def load(self, name: str) -> Any:
        """Return the object that a record exports as ``name``, a plain name or ``"module:name"``.

        Raises:
            UnknownNameError: (a ValueError) No record provides it. The message says which distribution may be
                missing.
            AmbiguousNameError: (a ValueError) Two distributions provide different objects under this name.
            PluginError: The record's reference cannot be loaded.
        """
        claims = self._claims(name)
        if not claims:
            known = sorted({key for entry in self._entries() for key in entry.record.exports})
            missing = filter(None, [self.catalog.missing()])
            message = not_there(f"no installed plugin provides '{name}'.", name, known, [*missing], self.catalog.failures())
            raise UnknownNameError(message, kind="public name", name=name, known=known)
        if len({c.record.exports[name] for c in claims}) > 1:
            raise AmbiguousNameError(
                f"'{name}' is provided by {' and by '.join(dict.fromkeys(str(c.source) for c in claims))}, each with its own object. "
                f'Leave one out with QUARK_DISABLED_PLUGINS, or let one record say replaces="{claims[0].source.distribution}"'
            )
        return load_for(claims[0].record.exports[name], f"the public name '{name}'", claims[0].source)

    def names(self) -> list[str]:
        """Return all plain names of AMD Quark's public API that plugins provide, sorted."""
        return sorted({key for entry in self._entries() for key in entry.record.exports if ":" not in key})

    def modules(self) -> dict[str, dict[str, Reference]]:
        """Return the modules of AMD Quark's public API that plugins provide: module → name → reference.

        Names that two records claim are left out; `load` raises for them.
        """
        out: dict[str, dict[str, Reference]] = {}
        for key in sorted({key for entry in self._entries() for key in entry.record.exports if ":" in key}):
            module, _, name = key.partition(":")
            references = {c.record.exports[key] for c in self._claims(key)}
            if len(references) == 1:
                out.setdefault(module, {})[name] = references.pop()
        return out

    def _entries(self) -> Iterator[Registered]:
        return (entry for registry in self.catalog.registries.values() for entry in registry.claims())

    def _claims(self, name: str) -> list[Registered]:
        return unreplaced(entry for entry in self._entries() if name in entry.record.exports)


class Catalog:
    """A set of plugins and their records.

    Args:
        candidates: Plugins to use, in order.
        settings: Which plugins to leave out, and whether failures are raised.

    Attributes:
        is_strict: Whether failures are raised (``QUARK_STRICT_PLUGINS``).

    Raises:
        PluginError: A plugin failed and ``settings.strict`` is set.
    """

    formats: registries.FormatRegistry
    observers: registries.ObserverRegistry
    schemes: registries.SchemeRegistry
    algorithms: registries.AlgorithmRegistry
    templates: registries.TemplateRegistry
    exporters: registries.ExporterRegistry
    selectors: registries.SelectorRegistry
    layer_types: registries.LayerTypeRegistry
    datasets: registries.DatasetRegistry
    metrics: registries.MetricRegistry
    quant_modes: registries.QuantModeRegistry
    graph_ops: registries.GraphOpRegistry
    commands: registries.CommandRegistry

    def __init__(self, candidates: Iterable[Candidate] = (), settings: Settings | None = None) -> None:
        settings = settings or Settings()
        candidates = tuple(candidates)
        self.left_out: dict[Source, str] = {c.source: variable for c in candidates if (variable := settings.left_out_by(c.source))}
        self._installed = frozenset(c.source.distribution for c in candidates)
        self._views: dict[object, Catalog] = {}
        self.is_strict = settings.strict
        self._collection = Collection(strict=settings.strict)
        self.registries: dict[str, Registry[Any]] = {
            kind.plural: kind.registry(kind, self._collection.records[kind.plural], self.failures, self.missing) for kind in KINDS
        }
        vars(self).update(self.registries)
        self.exports = Exports(self)
        self._collection.add_plugin(core_plugin, Source(CORE, VERSION, core_plugin.__name__, "core"))
        self._collection.add_candidates(c for c in candidates if c.source not in self.left_out)

    @classmethod
    def installed(cls, path: Iterable[str] | None = None, environ: Mapping[str, str] | None = None) -> Catalog:
        """Return the plugins on ``path`` with the settings of ``environ``.

        The defaults are ``sys.path`` and ``os.environ``.
        """
        return cls(discover(path), Settings.from_environ(os.environ if environ is None else environ))

    def add(self, plugin: object, source: Source) -> None:
        """Add a plugin object that belongs to no distribution, such as a listener of the running program."""
        self._collection.add_plugin(plugin, source)

    def among(self, distributions: Iterable[str]) -> Catalog:
        """Return the catalog of these distributions and the core, without importing anything again.

        If no others are installed, that is this catalog itself.

        Args:
            distributions: Normalized names.
        """
        wanted, mine = frozenset(distributions) | {CORE}, self._collection
        everyone = {*mine.sources, *self.left_out, *(entry.source for entries in mine.records.values() for entry in entries)}
        if {source.distribution for source in everyone} <= wanted:
            return self
        key = (wanted, len(mine.sources), len(mine.failures), *(registry.revision for registry in self.registries.values()))
        if key not in self._views:
            view = self._views[key] = Catalog()
            view._installed = self._installed & wanted
            view.left_out = {source: variable for source, variable in self.left_out.items() if source.distribution in wanted}
            view._collection.sources = {source: api for source, api in mine.sources.items() if source.distribution in wanted}
            view._collection.failures += [failure for failure in mine.failures if failure.source.distribution in wanted]
            for plural, entries in mine.records.items():
                view._collection.records[plural][:] = [entry for entry in entries if entry.source.distribution in wanted]
            for all_of, of_view in ((mine.listeners, view.listeners), (mine.measuring, view._collection.measuring)):
                for whose, listener in all_of:
                    if getattr(whose, "distribution", None) in wanted:
                        of_view.add(whose, listener)
        return self._views[key]

    def sources(self) -> tuple[Source, ...]:
        """Return plugins that were imported and registered."""
        return tuple(self._collection.sources)

    def failures(self) -> tuple[PluginFailure, ...]:
        """Return the failures of plugins, in order."""
        return tuple(self._collection.failures)

    def api(self, source: Source) -> ApiRange | None:
        """Return the versions of the plugin API that a plugin states, ``(lowest, highest)``, or None."""
        return self._collection.sources.get(source)

    def unstated(self) -> tuple[Source, ...]:
        """Return plugins with records that do not state the version of the plugin API."""
        with_records = {claim.source for registry in self.registries.values() for claim in registry.claims()}
        return tuple(s for s, api in self._collection.sources.items() if api is None and s in with_records and s.distribution != CORE)

    def missing(self, distributions: Sequence[str] = BUILT_IN) -> str:
        """Return a sentence about missing built-in distributions and how to get them, or an empty text."""
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

    def measure(self, moment: Moment) -> None:
        """Let plugins measure a run at a moment of it; none can do harm by an error."""
        self._collection.measuring.emit(moment)


_lock = threading.RLock()
_current: Catalog | None = None


def catalog() -> Catalog:
    """Return the plugins of this process. The first call discovers and imports them, and warns of failures.

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
    """Return the plugins of this process, with failures recorded even in strict mode.

    This is for code that must work beside a broken plugin.
    """
    try:
        return catalog()
    except PluginError:
        return Catalog(discover(), attrs.evolve(Settings.from_environ(os.environ), strict=False))


@contextmanager
def using(other: Catalog) -> Iterator[Catalog]:
    """Make another catalog that of this process inside a ``with`` block; for tests."""
    global _current  # noqa: PLW0603
    before, _current = _current, other
    try:
        yield other
    finally:
        _current = before


_program = Listeners(EVENT_HOOK)
"""Listeners of the running program, beside those of plugins."""


@contextmanager
def listening(listener: Listener, name: str = "a listener") -> Iterator[None]:
    """Call a function with the events of the runs inside a ``with`` block.

    Args:
        listener: Called with each `Event`, in the working thread, between two pieces of work.
        name: Owner, for the message if the listener raises.

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
        _program.remove(name, listener)


def is_heard() -> bool:
    """Return whether there is any listener."""
    return bool(_program) or bool(catalog().listeners)


def emit(event: Event) -> None:
    """Pass an event to the program's listeners, then to plugins. Errors of listeners do no harm."""
    _program.emit(event)
    catalog().emit(event)
