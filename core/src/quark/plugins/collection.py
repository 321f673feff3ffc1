"""Collection: each plugin is imported, registered, called and validated by itself; failures are recorded."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from quark.base.log import get_logger
from quark.base.names import closest
from quark.errors import PluginError
from quark.plugins.api_version import ApiRange, as_api_range
from quark.plugins.discovery import CORE, Candidate, Source
from quark.plugins.failures import PluginFailure, leave_out
from quark.plugins.hookspecs import PROJECT, QuarkHooks
from quark.plugins.kinds import KINDS, Kind
from quark.plugins.records import Record

if TYPE_CHECKING:
    from quark.plugins.events import Event

__all__ = ["API_ATTRIBUTE", "EVENT_HOOK", "MOST_FAILURES", "MOST_RECORDS", "Collection", "Listener", "Listeners", "Registered"]

Listener = Callable[["Event"], object]
"""A function of one event; its result is ignored."""


class Listeners:
    """Listeners in order, each with its owner, for messages."""

    def __init__(self) -> None:
        self._listeners: list[tuple[object, Listener]] = []
        self._failed: set[int] = set()

    def __iter__(self) -> Iterator[tuple[object, Listener]]:
        return iter(tuple(self._listeners))

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, whose: object, listener: Listener) -> None:
        """Add a listener."""
        self._listeners.append((whose, listener))

    def remove(self, whose: object, listener: Listener) -> None:
        """Take away a listener that was added."""
        self._listeners.remove((whose, listener))
        self._failed.discard(id(listener))

    def of(self, whose: object) -> int:
        """Return the number of listeners of one owner."""
        return sum(owner == whose for owner, _ in self)

    def emit(self, event: Event) -> None:
        """Pass an event to every listener; the first error of each is logged, later ones are ignored."""
        for whose, listener in self:
            try:
                listener(event)
            except KeyboardInterrupt:
                raise
            except BaseException:
                if id(listener) not in self._failed:
                    self._failed.add(id(listener))
                    message = "%s raised in quark_on_event for '%s'; this is ignored, and so is what it raises from now on"
                    get_logger(__name__).warning(message, whose, event.name, exc_info=True)


EVENT_HOOK = "quark_on_event"
API_ATTRIBUTE = "QUARK_API"
"""Attribute of a plugin that states for which versions of the plugin API all its records were written."""
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(spec).parameters)[1:]
    for name, spec in inspect.getmembers(QuarkHooks, inspect.isfunction)
    if name.startswith("quark_")
}
_THE_HOOKS = f"the hooks are {', '.join(_ARGUMENTS)}, each marked with @hookimpl from quark.plugins"
MOST_RECORDS = 10_000
"""Records that one hook of one plugin may yield: a generator that never ends must not block the program."""
MOST_FAILURES = 20
"""Invalid records of one hook after which the rest is left out."""

_NO_MORE: Any = object()


@attrs.frozen
class Registered:
    """A record and the plugin it came from."""

    record: Record
    source: Source


class _Manager(pluggy.PluginManager):
    """pluggy's manager, restricted to valid hooks; it records the errors of others."""

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(QuarkHooks)
        self.complaints: list[tuple[str, str]] = []  # (error, fix) of the plugin that is being registered

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None:
            if _looks_forgotten(plugin, name):
                self.complaints.append((f"the function '{name}' is not marked as a hook", _spelling_fix(name)))
            return None
        hook = options.get("specname") or name
        complaint = _complaint(getattr(plugin, name), hook, options)
        if complaint is not None:
            self.complaints.append(complaint)
        return options if complaint is None and hook in _ARGUMENTS else None


def _looks_forgotten(plugin: Any, name: str) -> bool:
    """Return whether an unmarked function was meant as a hook.

    It then is defined in the plugin itself, under a hook's name or nearly so.
    """
    if not name.startswith(("quark_register", "quark_on_")):
        return False
    function = inspect.getattr_static(plugin, name, None)
    home = getattr(plugin, "__name__", None) if inspect.ismodule(plugin) else type(plugin).__module__
    return inspect.isfunction(function) and function.__module__ == home


def _spelling_fix(name: str) -> str:
    near = closest(name, _ARGUMENTS)
    if near == name:
        return f"write @hookimpl (from quark.plugins) above 'def {name}'"
    hint = f"perhaps '{near}' is meant; " if near else ""
    return f"{hint}{_THE_HOOKS}"


def _complaint(function: Callable[..., Any], hook: str, options: Any) -> tuple[str, str] | None:
    """Return the error in one implementation, with the fix, or None."""
    if hook not in _ARGUMENTS:
        return None if options.get("optionalhook") else (f"there is no hook '{hook}'", _spelling_fix(hook))
    if options.get("wrapper") or options.get("hookwrapper"):
        error = f"the hook '{hook}' is written as a wrapper, but every plugin is called by itself"
        return error, "write it as a plain function under a plain @hookimpl"
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unknown := [name for name in required if name not in _ARGUMENTS[hook]]:
        offered = f"only ({', '.join(_ARGUMENTS[hook])})" if _ARGUMENTS[hook] else "no arguments"
        return f"the hook '{hook}' asks for unknown arguments ({', '.join(unknown)})", f"write it with {offered}"
    return None


@attrs.define
class Collection:
    """Everything that a set of plugins provides.

    Attributes:
        strict: Whether a failure is raised instead of recorded.
        records: By kind (in the plural), in the order of discovery.
        failures: Failures, in the order in which they happened.
        listeners: Implementations of the event hook, with their plugins.
        sources: Plugins that were imported and registered.
        unstated: Plugins among the sources that do not state the version of the plugin API that their records
            were written for.
    """

    strict: bool = False
    records: dict[str, list[Registered]] = attrs.field(factory=lambda: {kind.plural: [] for kind in KINDS})
    failures: list[PluginFailure] = attrs.field(factory=list)
    listeners: Listeners = attrs.field(factory=Listeners)
    sources: list[Source] = attrs.field(factory=list)
    unstated: list[Source] = attrs.field(factory=list)
    _manager: _Manager = attrs.field(factory=_Manager, init=False, repr=False)

    def add_candidates(self, candidates: Iterable[Candidate]) -> None:
        """Import each plugin and add its records; raises PluginError in strict mode only.

        What a plugin prints meanwhile goes to stderr: stdout has the answer of a command.
        """
        with redirect_stdout(sys.stderr):
            self._add_candidates(candidates)

    def _add_candidates(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            for requirement in candidate.unmet:
                self._fail(candidate.source, "require", f"it requires {requirement[0]}, and {requirement[1]}")
            try:
                plugin = candidate.entry_point.load()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._fail(candidate.source, "import", f"importing '{candidate.source.module}' raised {_described(error)}", exception=error)
            else:
                self.add_plugin(plugin, candidate.source)

    def add_plugin(self, plugin: object, source: Source) -> None:
        """Add the records of an imported plugin: compare its API range, then call and validate its hooks."""
        try:
            api = as_api_range(getattr(plugin, API_ATTRIBUTE, None))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            complaint = f"its {API_ATTRIBUTE} is not valid: {_described(error)}"
            self._fail(source, "require", complaint, fix=f"write {API_ATTRIBUTE} = (lowest, highest)")
            return
        if api is not None and not api.allows():
            complaint, fix = api.refusal()
            self._fail(source, "require", f"it {complaint}", fix=fix)
            return
        implementations = self._register(plugin, source)
        if implementations is None:
            return
        self.sources.append(source)
        if EVENT_HOOK in implementations:
            self.listeners.add(source, _listener(implementations[EVENT_HOOK]))
        for kind in KINDS:
            if kind.hook in implementations:
                self._collect(kind, implementations[kind.hook].function, source, api)
        own = (entry.record for entries in self.records.values() for entry in entries if entry.source == source)
        if source.distribution != CORE and any(record.api is None for record in own):
            self.unstated.append(source)

    def _register(self, plugin: object, source: Source) -> dict[str, pluggy.HookImpl] | None:
        """Return the plugin's valid hooks by name; None where it could not be registered at all."""
        self._manager.complaints.clear()
        try:
            self._manager.register(plugin, f"{source.distribution}:{source.entry_point}")
            callers = self._manager.get_hookcallers(plugin) or []
            implementations = {c.name: impl for c in callers for impl in c.get_hookimpls() if impl.plugin is plugin}
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._fail(source, "register", f"registering it raised {_described(error)}", exception=error)
            return None
        for complaint, fix in self._manager.complaints:
            self._fail(source, "register", complaint, fix=fix)
        if not implementations and not self._manager.complaints:
            self._fail(source, "register", "it has no hook, and so provides nothing", fix=_THE_HOOKS)
            return None
        return implementations

    def _collect(self, kind: Kind, function: Callable[..., Any], source: Source, api: ApiRange | None) -> None:
        mine = (e.record for e in self.records[kind.plural] if e.source.distribution == source.distribution)
        taken = {key for record in mine for key in (record.name, *record.aliases)}
        failed = 0
        for record in self._called(kind, function, source):
            defect = _defect(kind, record, taken)
            if defect is None:
                self.records[kind.plural].append(Registered(_with_range(record, api), source))
                taken.update((record.name, *record.aliases))
                continue
            failed += 1
            self._fail(source, "validate", f"the hook '{kind.hook}' {defect[0]}", fix=defect[1])
            if failed == MOST_FAILURES:
                complaint = f"{failed} records of the hook '{kind.hook}' are wrong: what it yields after them is left out"
                self._fail(source, "validate", complaint)
                return

    def _called(self, kind: Kind, function: Callable[..., Any], source: Source) -> Iterator[Any]:
        """Yield the hook's records, up to where it raises."""
        records = self._attempt(kind, source, 0, lambda: _iterator(function()))
        if isinstance(records, str):
            complaint = f"the hook '{kind.hook}' returned {records}, not an iterable of {kind.record.__name__}"
            self._fail(source, "validate", complaint, fix=f"yield each {kind.record.__name__}, or return a list of them")
            return
        count = 0
        while records is not _NO_MORE and (record := self._attempt(kind, source, count, lambda: next(records, _NO_MORE))) is not _NO_MORE:
            if count == MOST_RECORDS:
                complaint = f"the hook '{kind.hook}' yields more than {MOST_RECORDS} records: the rest is left out"
                self._fail(source, "call", complaint, fix="register what belongs together as one record with options")
                return
            yield record
            count += 1

    def _attempt(self, kind: Kind, source: Source, count: int, call: Callable[[], Any]) -> Any:
        """Return what a hook's code gives after ``count`` records, or `_NO_MORE` if it raises."""
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            before = f" after {count} record{'s' if count > 1 else ''}, kept" if count else ""
            self._fail(source, "call", f"the hook '{kind.hook}' raised {_described(error)}{before}", exception=error)
            return _NO_MORE

    def _fail(self, source: Source, stage: str, error: str, *, fix: str | None = None, exception: BaseException | None = None) -> None:
        failure = PluginFailure(source, stage, error, fix or leave_out(source, exception), exception)
        if self.strict:
            raise PluginError(f"{failure} (raised because QUARK_STRICT_PLUGINS is set)") from exception
        self.failures.append(failure)


def _listener(implementation: pluggy.HookImpl) -> Listener:
    """Return the implementation as a function of the event, which its signature may lack."""
    return implementation.function if implementation.argnames else lambda _: implementation.function()


def _defect(kind: Kind, record: Any, taken: set[str]) -> tuple[str, str] | None:
    """Return the error in a record, with the fix, or None.

    Args:
        kind: Of the hook.
        record: A record, or anything else that the hook yields.
        taken: Names of its distribution's other records, which it must not use a second time.
    """
    if not isinstance(record, kind.record):
        return f"yields {_kind_of(record)} where a {kind.record.__name__} is wanted", f"yield {kind.record.__name__}(name=…, …)"
    try:
        attrs.validate(record)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"yields a record that is not valid: {_described(error)}", "correct that field of the record"
    if record.api is not None and not record.api.allows():
        complaint, fix = record.api.refusal()
        return f"yields '{record.name}', which {complaint}", fix
    if twice := {record.name, *record.aliases} & taken:
        return f"yields the name '{min(twice)}' a second time in one distribution; the first stands", "give each its own name"
    return None


def _with_range(record: Record, api: ApiRange | None) -> Record:
    """Return the record with its plugin's range of API versions where it states none."""
    if api is None or record.api is not None:
        return record
    try:
        return attrs.evolve(record, api=api)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return record  # a subclass with a constructor of its own cannot be copied; its range is not shown


def _iterator(result: object) -> Iterator[Any] | str:
    """Return an iterator of what a hook returns, or what it is if it is none of records."""
    return iter(result) if isinstance(result, Iterable) and not isinstance(result, str | bytes) else _kind_of(result)


def _kind_of(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _described(error: BaseException) -> str:
    # Errors of attrs' validators carry the field and its options besides the message.
    is_of_attrs = len(error.args) > 1 and isinstance(error.args[0], str) and isinstance(error.args[1], attrs.Attribute)
    text = " ".join(str(error.args[0] if is_of_attrs else error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
