"""`Catalog` is a set of plugins and their registries. A process creates its catalog on first use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from quark.base.version import VERSION
from quark.errors import AmbiguousNameError, PluginError, UnknownNameError
from quark.plugins import core_plugin, registries
from quark.plugins.api_version import ApiRange
from quark.plugins.collection import EVENT_HOOK, Collection, Listener, Listeners
from quark.plugins.discovery import CORE, Candidate, Settings, Source, discover
from quark.plugins.failures import PluginFailure, warn_of_unstated, warn_once
from quark.plugins.registries import BUILT_IN, KINDS
from quark.plugins.registry import Registry, load_for, not_there, unreplaced

if TYPE_CHECKING:
    from quark.plugins.events import Event
    from quark.plugins.measuring import Moment


class Catalog:
    """A set of plugins and their records.

    Args:
        candidates: Plugins to use, in order.
        settings: Settings that choose which plugins to leave out, and whether failures are raised.

    Attributes:
        collection: The records, hooks and failures of the plugins.
        distributions: Names of the distributions that have plugins, including plugins that are left out.
        left_out: Mapping from a plugin that is left out to the environment variable that leaves it out.
        is_strict: Whether failures are raised (``QUARK_STRICT_PLUGINS``).
        registries: Mapping from a kind in the plural, such as ``"schemes"``, to its registry.
        listeners: The event hooks of the plugins.
        measuring: The measuring hooks of the plugins.

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
    listeners: Listeners
    measuring: Listeners

    def __init__(self, candidates: Iterable[Candidate] = (), settings: Settings | None = None) -> None:
        settings = settings or Settings()
        candidates = tuple(candidates)
        self.left_out: dict[Source, str] = {c.source: variable for c in candidates if (variable := settings.left_out_by(c.source))}
        self.distributions = frozenset(c.source.distribution for c in candidates)
        self.is_strict = settings.strict
        self.collection = Collection(strict=settings.strict)
        self.registries: dict[str, Registry[Any]] = {
            kind.plural: kind.registry(kind, self.collection.records[kind.plural], self.failures, self.missing) for kind in KINDS
        }
        vars(self).update(self.registries)
        self.listeners, self.measuring = self.collection.listeners, self.collection.measuring
        self.collection.add_plugin(core_plugin, Source(CORE, VERSION, core_plugin.__name__, "core"))
        self.collection.add_candidates(c for c in candidates if c.source not in self.left_out)

    @classmethod
    def installed(cls, path: Iterable[str] | None = None, environ: Mapping[str, str] | None = None) -> Catalog:
        """Return a catalog of the plugins on ``path``, with the settings of ``environ``.

        The default of ``path`` is ``sys.path``, and the default of ``environ`` is ``os.environ``.
        """
        return cls(discover(path), Settings.from_environ(os.environ if environ is None else environ))

    def add(self, plugin: object, source: Source) -> None:
        """Add a plugin that belongs to no distribution, such as a listener of the running program."""
        self.collection.add_plugin(plugin, source)

    def sources(self) -> tuple[Source, ...]:
        """Return the sources of the plugins that were imported and registered."""
        return tuple(self.collection.sources)

    def failures(self) -> tuple[PluginFailure, ...]:
        """Return the failures of plugins, in the order in which they happened."""
        return tuple(self.collection.failures)

    def api(self, source: Source) -> ApiRange | None:
        """Return the API versions ``(lowest, highest)`` that a plugin states, or None if it states none."""
        return self.collection.sources.get(source)

    def unstated(self) -> tuple[Source, ...]:
        """Return the sources of plugins that register records but state no version of the plugin API."""
        with_records = {claim.source for registry in self.registries.values() for claim in registry.claims()}
        return tuple(s for s, api in self.collection.sources.items() if api is None and s in with_records and s.distribution != CORE)

    def missing(self, distributions: Sequence[str] = BUILT_IN) -> str:
        """Return sentences about missing distributions of quark, and about plugins that are left out.

        The text says how to install the distributions. It is empty if nothing is missing.
        """
        absent = [d for d in distributions if d not in self.distributions and d != CORE]
        sentences = [f"The built-in ones come with {d}, which is not installed: pip install {d}." for d in absent]
        sentences += [f"{variable} leaves out {source}." for source, variable in self.left_out.items()]
        return " ".join(sentences)

    def exported(self, name: str) -> Any:
        """Return the object that a record exports as ``name``. ``name`` is a plain name or ``"module:name"``.

        Raises:
            UnknownNameError: (a ValueError) No record exports ``name``. The message says which distribution
                may be missing.
            AmbiguousNameError: (a ValueError) Two distributions export different objects under this name.
            PluginError: The reference of the record cannot be loaded.
        """
        entries = [entry for registry in self.registries.values() for entry in registry.claims()]
        claims = unreplaced(entry for entry in entries if name in entry.record.exports)
        if not claims:
            known = sorted({key for entry in entries for key in entry.record.exports})
            message = not_there(f"no installed plugin provides '{name}'.", name, known, [*filter(None, [self.missing()])], self.failures())
            raise UnknownNameError(message, kind="public name", name=name, known=known)
        if len({c.record.exports[name] for c in claims}) > 1:
            raise AmbiguousNameError(
                f"{' and '.join(dict.fromkeys(str(c.source) for c in claims))} provide different objects under the name '{name}'. "
                f'Leave one plugin out with QUARK_DISABLED_PLUGINS, or write replaces="{claims[0].source.distribution}" in one record'
            )
        return load_for(claims[0].record.exports[name], f"the public name '{name}'", claims[0].source)

    def emit(self, event: Event) -> None:
        """Call the event hooks of the plugins with an event."""
        self.listeners.emit(event)

    def measure(self, moment: Moment) -> None:
        """Call the measuring hooks of the plugins with a moment. Errors of the hooks are logged and
        ignored."""
        self.measuring.emit(moment)


_lock = threading.RLock()
_current: Catalog | None = None


def catalog() -> Catalog:
    """Return the catalog of this process. The first call imports the plugins and warns about failures.

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
    """Return the catalog of this process. Record failures, and do not raise them in strict mode.

    This is for code that must work although a plugin is broken.
    """
    try:
        return catalog()
    except PluginError:
        return Catalog(discover(), attrs.evolve(Settings.from_environ(os.environ), strict=False))


@contextmanager
def using(other: Catalog) -> Iterator[Catalog]:
    """Use the catalog ``other`` in this process until the ``with`` block ends. This is for tests."""
    global _current  # noqa: PLW0603
    before, _current = _current, other
    try:
        yield other
    finally:
        _current = before


_program = Listeners(EVENT_HOOK)
"""Listeners of the running program, in addition to the listeners of plugins."""


@contextmanager
def listening(listener: Listener, name: str = "a listener") -> Iterator[None]:
    """Call ``listener`` with each event of the runs inside the ``with`` block.

    Args:
        listener: Function that is called with each `Event`. It is called in the thread that does the work,
            between two steps of the work.
        name: Name of the listener. The log message shows it if the listener raises an exception.

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
    """Return whether the program or a plugin listens to events."""
    return bool(_program) or bool(catalog().listeners)


def emit(event: Event) -> None:
    """Call the program's listeners, and then the plugins' event hooks, with an event.

    Errors of listeners and hooks are logged and ignored.
    """
    _program.emit(event)
    catalog().emit(event)
