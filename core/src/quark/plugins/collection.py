"""`Collection` imports and registers plugins, calls their hooks, validates records, and records failures."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from quark.base.lazy import imported
from quark.base.log import get_logger
from quark.base.names import closest
from quark.errors import PluginError
from quark.plugins.api_version import as_api_range, refusal
from quark.plugins.discovery import Candidate, Source
from quark.plugins.failures import PluginFailure, attempted, leave_out
from quark.plugins.hookspecs import QuarkHooks
from quark.plugins.model_hookspecs import PROJECT
from quark.plugins.registries import KINDS
from quark.plugins.registry import Kind, Registered

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

    from quark.plugins.events import Event
    from quark.plugins.measuring import Moment

Listener = Callable[[Any], object]
"""Type of functions that are called with an event or a moment. Their results are ignored."""


def _load(entry_point: EntryPoint) -> Any:
    """Import the module of an entry point as in a new process, and return the object that the entry point
    names."""
    imported(entry_point.module)
    return entry_point.load()


class Listeners:
    """An ordered list of listeners. Each listener has an owner, whose name is shown in messages.

    Args:
        hook: Name of the hook that the listeners implement. Messages show it.
    """

    def __init__(self, hook: str) -> None:
        self._hook = hook
        self._listeners: list[tuple[object, Listener]] = []
        self._failed: set[int] = set()

    def __iter__(self) -> Iterator[tuple[object, Listener]]:
        return iter(tuple(self._listeners))

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, whose: object, listener: Listener) -> None:
        """Add a listener that belongs to ``whose``."""
        self._listeners.append((whose, listener))

    def remove(self, whose: object, listener: Listener) -> None:
        """Remove a listener that `add` has added with the same owner."""
        self._listeners.remove((whose, listener))
        self._failed.discard(id(listener))

    def emit(self, event: Event | Moment) -> None:
        """Call every listener with an event. Log the first error of each listener, and ignore later ones."""
        for whose, listener in self:
            attempted(partial(listener, event), partial(self._log, whose, listener, event))

    def _log(self, whose: object, listener: Listener, event: Event | Moment, error: BaseException) -> None:
        if id(listener) not in self._failed:
            self._failed.add(id(listener))
            message = "%s raised in %s for '%s'. quark ignores this error and further errors of this listener"
            get_logger(__name__).warning(message, whose, self._hook, getattr(event, "name", type(event).__name__), exc_info=error)


EVENT_HOOK, MEASURING_HOOK = "quark_on_event", "quark_measure"
API_ATTRIBUTE = "QUARK_API"
"""Name of the attribute in which a plugin states the versions of the plugin API that it was written for."""
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(spec).parameters)[1:]
    for name, spec in inspect.getmembers(QuarkHooks, inspect.isfunction)
    if name.startswith("quark_")
}
_THE_HOOKS = f"the hooks are {', '.join(_ARGUMENTS)}, each marked with @hookimpl from quark.plugins"
MOST_RECORDS = 10_000
"""Maximum number of records that one hook of one plugin may yield. An endless generator must not block the
program.
"""
MOST_FAILURES = 20
"""Maximum number of invalid records of one hook. After these, the remaining records are left out."""

_NOTHING: Any = object()
"""Result in place of the result of plugin code that raised, or of an iterator that has ended."""


class _Manager(pluggy.PluginManager):
    """A plugin manager of pluggy for one plugin. Each plugin has its own manager.

    Plugins cannot share one manager. Up to pluggy 1.6, `subset_hook_caller` also calls functions
    of excluded plugins if they implement a hook by ``specname=``.

    If one hook cannot be called, the other hooks of the plugin still work. pluggy alone would refuse the
    whole plugin.

    Attributes:
        complaints: A pair of error and fix for each hook that cannot be called.
    """

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(QuarkHooks)
        self.complaints: list[tuple[str, str]] = []

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

    def hooks_of(self, plugin: object) -> dict[str, pluggy.HookCaller]:
        """Register the plugin. Return a dictionary from the name of each hook to the hook's caller."""
        self.register(plugin)
        hooks = {caller.name: caller for caller in self.get_hookcallers(plugin) or ()}
        for name in [name for name, caller in hooks.items() if all(map(_is_wrapper, caller.get_hookimpls()))]:
            error = f"the hook '{name}' is written as a wrapper, but the plugin has no function that it could wrap"
            self.complaints.append((error, "write it as a plain function under a plain @hookimpl: each plugin is called by itself"))
            del hooks[name]
        return hooks


def _is_wrapper(implementation: pluggy.HookImpl) -> bool:
    return implementation.wrapper or implementation.hookwrapper


def _looks_forgotten(plugin: Any, name: str) -> bool:
    """Return whether a function without ``@hookimpl`` was probably meant to implement a hook.

    Return True if the function is defined in the plugin itself and has a name that begins like the name of a
    hook.
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
    """Return the error in the implementation of a hook, and the fix. Return None if there is no error."""
    if hook not in _ARGUMENTS:
        return None if options.get("optionalhook") else (f"there is no hook '{hook}'", _spelling_fix(hook))
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unknown := [name for name in required if name not in _ARGUMENTS[hook]]:
        offered = f"only ({', '.join(_ARGUMENTS[hook])})" if _ARGUMENTS[hook] else "no arguments"
        return f"the hook '{hook}' asks for unknown arguments ({', '.join(unknown)})", f"write it with {offered}"
    return None


@attrs.define
class Collection:
    """The records, hooks and failures of a set of plugins.

    Attributes:
        strict: Whether quark raises a failure instead of recording it.
        records: Mapping from a kind in the plural to the records of this kind, in the order of discovery.
        failures: Failures, in the order in which they happened.
        listeners: The event hooks and the plugins that implement them.
        measuring: The measuring hooks and the plugins that implement them.
        sources: Mapping from each plugin that was imported and registered to the range of API versions that
            the plugin states. The range is None if the plugin states none.
    """

    strict: bool = False
    records: dict[str, list[Registered]] = attrs.field(factory=lambda: {kind.plural: [] for kind in KINDS})
    failures: list[PluginFailure] = attrs.field(factory=list)
    listeners: Listeners = attrs.field(factory=partial(Listeners, EVENT_HOOK))
    measuring: Listeners = attrs.field(factory=partial(Listeners, MEASURING_HOOK))
    sources: dict[Source, tuple[int, int] | None] = attrs.field(factory=dict)
    _plugins: list[object] = attrs.field(factory=list, init=False, repr=False)

    def add_candidates(self, candidates: Iterable[Candidate]) -> None:
        """Import each plugin and add its records. Raise PluginError in strict mode only.

        Text that a plugin prints goes to stderr, because stdout is for the output of a command.
        """
        with redirect_stdout(sys.stderr):
            for candidate in candidates:
                source = candidate.source
                for requirement, state in candidate.unmet:
                    self._fail(source, "require", f"it requires {requirement}, and {state}")
                plugin = self._attempt(source, "import", f"importing '{source.module}' raised", partial(_load, candidate.entry_point))
                if plugin is not _NOTHING:
                    self.add_plugin(plugin, source)

    def add_plugin(self, plugin: object, source: Source) -> None:
        """Add the records and hooks of an imported plugin.

        If the plugin was written for other API versions than the core's version, record a failure instead.
        """
        stated, fix = f"its {API_ATTRIBUTE} is not valid:", f"write {API_ATTRIBUTE} = (lowest, highest)"
        api = self._attempt(source, "require", stated, lambda: as_api_range(getattr(plugin, API_ATTRIBUTE, None)), fix=fix)
        if api is _NOTHING:
            return
        if (refused := refusal(api)) is not None:
            self._fail(source, "require", f"it {refused[0]}", fix=refused[1])
            return
        if any(plugin is other for other in self._plugins):
            self._fail(source, "register", "another entry point leads to the same plugin")
            return
        manager = _Manager()
        hooks = self._attempt(source, "register", "registering it raised", lambda: manager.hooks_of(plugin))
        if hooks is _NOTHING:
            return
        for complaint, fix in manager.complaints:
            self._fail(source, "register", complaint, fix=fix)
        if not hooks and not manager.complaints:
            self._fail(source, "register", "it implements no hook, and so provides nothing", fix=_THE_HOOKS)
            return
        self._plugins.append(plugin)
        self.sources[source] = api
        for kind in KINDS:
            if kind.hook in hooks:
                self._collect(kind, hooks[kind.hook], source)
        if EVENT_HOOK in hooks:
            self.listeners.add(source, lambda event: hooks[EVENT_HOOK](event=event))
        if MEASURING_HOOK in hooks:
            self.measuring.add(source, lambda moment: hooks[MEASURING_HOOK](moment=moment))

    def _collect(self, kind: Kind, hook: pluggy.HookCaller, source: Source) -> None:
        mine = (e.record for e in self.records[kind.plural] if e.source.distribution == source.distribution)
        taken = {key for record in mine for key in (record.name, *record.aliases)}
        failed = 0
        for record in self._called(kind, hook, source):
            defect = _defect(kind, record, taken)
            if defect is None:
                self.records[kind.plural].append(Registered(record, source))
                taken.update((record.name, *record.aliases))
                continue
            failed += 1
            self._fail(source, "validate", f"the hook '{kind.hook}' {defect[0]}", fix=defect[1])
            if failed == MOST_FAILURES:
                complaint = f"{failed} records of the hook '{kind.hook}' are wrong: the records after them are left out"
                self._fail(source, "validate", complaint)
                return

    def _called(self, kind: Kind, hook: pluggy.HookCaller, source: Source) -> Iterator[Any]:
        """Yield the records that a hook returns. Stop if the hook raises an exception."""
        results = self._attempt(source, "call", f"the hook '{kind.hook}' raised", hook)
        if results is _NOTHING:
            return
        wrong = _not_records(results, hook.get_hookimpls())
        if wrong is not None:
            complaint = f"the hook '{kind.hook}' returned {wrong}, not an iterable of {kind.record.__name__}"
            self._fail(source, "validate", complaint, fix=f"yield each {kind.record.__name__}, or return a list of them")
            return
        records = itertools.chain.from_iterable(results)
        for count in itertools.count():
            kept = f" after {count} record{'s' if count > 1 else ''}, kept" if count else ""
            record = self._attempt(source, "call", f"the hook '{kind.hook}' raised", lambda: next(records, _NOTHING), kept)
            if record is _NOTHING:
                return
            if count == MOST_RECORDS:
                complaint = f"the hook '{kind.hook}' yields more than {MOST_RECORDS} records: the rest is left out"
                self._fail(source, "call", complaint, fix="register related things as one record with options")
                return
            yield record

    def _attempt(self, source: Source, stage: str, doing: str, call: Callable[[], Any], after: str = "", *, fix: str | None = None) -> Any:
        """Return the result of ``call``, which runs plugin code.

        If ``call`` raises an exception, record a failure and return `_NOTHING`.
        """

        def failed(error: BaseException) -> Any:
            self._fail(source, stage, f"{doing} {_described(error)}{after}", fix=fix, exception=error)
            return _NOTHING

        return attempted(call, failed)

    def _fail(self, source: Source, stage: str, error: str, *, fix: str | None = None, exception: BaseException | None = None) -> None:
        failure = PluginFailure(source, stage, error, fix or leave_out(source, exception), exception)
        if self.strict:
            raise PluginError(f"{failure} (raised because QUARK_STRICT_PLUGINS is set)") from exception
        self.failures.append(failure)


def _not_records(results: object, implementations: Sequence[pluggy.HookImpl]) -> str | None:
    """Return a description of the result of a hook if the result is not an iterable of records.

    Return None if it is one. A hook wrapper may join the results of several functions, but must not drop all
    of them.
    """
    if not isinstance(results, list):  # a wrapper replaced the list
        return _kind_of(results)
    wrong = [one for one in results if isinstance(one, str | bytes) or not isinstance(one, Iterable)]
    if wrong:
        return _kind_of(wrong[0])
    wanted = 1 if any(map(_is_wrapper, implementations)) else len(implementations)
    return "None" if len(results) < wanted else None  # pluggy leaves None out


def _defect(kind: Kind, record: Any, taken: set[str]) -> tuple[str, str] | None:
    """Return the error in a record, and the fix. Return None if there is no error.

    Args:
        kind: Kind of the records that the hook must yield.
        record: The object that the hook yielded.
        taken: Names of earlier records of the distribution. The record must not have one of them.
    """
    if not isinstance(record, kind.record):
        return f"yields {_kind_of(record)} instead of a {kind.record.__name__}", f"yield {kind.record.__name__}(name=…, …)"
    error = attempted(lambda: attrs.validate(record), lambda error: error)
    if error is not None:
        return f"yields a record that is not valid: {_described(error)}", "correct that field of the record"
    if twice := {record.name, *record.aliases} & taken:
        return f"yields the name '{min(twice)}' a second time in one distribution; the first one is used", "give each record its own name"
    return None


def _kind_of(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _described(error: BaseException) -> str:
    # The arguments of an error from an attrs validator are the message, the field, and further objects.
    is_of_attrs = len(error.args) > 1 and isinstance(error.args[0], str) and isinstance(error.args[1], attrs.Attribute)
    text = " ".join(str(error.args[0] if is_of_attrs else error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
