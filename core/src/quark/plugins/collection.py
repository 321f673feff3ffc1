"""Collect what plugins register, each by itself: import → register → call → validate. A failure is recorded; the others carry on."""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import pluggy

from quark.errors import PluginError
from quark.names import closest
from quark.plugins.discovery import STRICT, Candidate
from quark.plugins.hookspecs import EVENT_HOOK, HOOKS, KINDS, PROJECT, QuarkSpecs
from quark.plugins.records import Record
from quark.plugins.sources import PluginFailure, QuarkPluginWarning, Source

_IMPLEMENTATION = f"{PROJECT}_impl"
_LEAVE_OUT = "set QUARK_DISABLED_PLUGINS={} to leave it out"


@attrs.frozen
class Registration:
    """A record and where it comes from."""

    record: Record
    source: Source


@attrs.define
class Collected:
    """Everything that came out of the plugins.

    Attributes:
        registrations: By kind, in order of discovery.
        failures: What went wrong.
        listeners: Functions that hear events, with their sources.
        sources: Every plugin that was found, failed or not.
    """

    registrations: dict[str, list[Registration]] = attrs.field(factory=lambda: {kind: [] for kind in KINDS})
    failures: list[PluginFailure] = attrs.field(factory=list)
    listeners: list[tuple[Any, Source]] = attrs.field(factory=list)
    sources: list[Source] = attrs.field(factory=list)


def collect(candidates: Iterable[Candidate], environ: Mapping[str, str] | None = None) -> Collected:
    """Import and call every plugin.

    A generator that raises late keeps what it yielded before. With ``QUARK_STRICT_PLUGINS=1`` the first failure is raised.

    Raises:
        PluginError: In strict mode, for the first failure.
    """
    environ = os.environ if environ is None else environ
    found = Collected()
    for candidate in candidates:
        found.sources.append(candidate.source)
        for failure in _collect_one(candidate.source, found):
            found.failures.append(failure)
            if environ.get(STRICT, "") not in ("", "0"):
                raise PluginError(str(failure))
            warnings.warn(QuarkPluginWarning(str(failure)), stacklevel=2)
    return found


def _collect_one(source: Source, found: Collected) -> Iterator[PluginFailure]:
    def failure(stage: str, error: object, cure: str) -> PluginFailure:
        text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
        return PluginFailure(source, stage, text, f"{cure}, or {_LEAVE_OUT.format(source.entry_point)}")

    upgrade = f"Reinstall or upgrade {source.distribution}"
    try:
        plugin = _load(source)
    except Exception as error:  # anyone's code may raise anything
        yield failure("import", error, upgrade)
        return
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(QuarkSpecs)
    problems = list(_signature_problems(plugin))
    for problem, cure in problems:
        yield failure("register", problem, cure)
    if problems:
        return
    try:
        manager.register(plugin, name=source.entry_point)
        manager.check_pending()
    except Exception as error:
        yield failure("register", error, upgrade)
        return
    for hook in manager.hook.__dict__.values():
        for implementation in hook.get_hookimpls() if hasattr(hook, "get_hookimpls") else ():
            if hook.name == EVENT_HOOK:
                found.listeners.append((implementation.function, source))
                continue
            kind = hook.name.removeprefix("quark_register_")
            yield from (failure(*problem) for problem in _records_of(implementation.function, kind, source, found, upgrade))


def _records_of(provide: Any, kind: str, source: Source, found: Collected, upgrade: str) -> Iterator[tuple[str, object, str]]:
    hook = f"quark_register_{kind}"
    wanted = KINDS[kind]
    try:
        for record in provide() or ():
            if isinstance(record, wanted):
                found.registrations[kind].append(Registration(record, source))
            else:
                yield "validate", f"{hook} yielded a {type(record).__name__}: {record!r}", f"Yield {wanted.__name__} objects from {hook}"
    except (ValueError, TypeError) as error:  # what records raise when they are made with a bad name or field
        yield "validate" if _raised_by_records(error) else "call", _in(hook, error), upgrade
    except Exception as error:
        yield "call", _in(hook, error), upgrade


def _in(hook: str, error: BaseException) -> str:
    return f"{hook} raised {type(error).__name__}: {error}"


def _raised_by_records(error: BaseException) -> bool:
    """Whether the error comes from making a record, not from the plugin's own code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(("quark.plugins.records", "quark.lazy", "attr"))


def _load(source: Source) -> Any:
    module, _, attribute = source.module.partition(":")
    plugin = importlib.import_module(module.strip())
    for part in filter(None, attribute.strip().split(".")):
        plugin = getattr(plugin, part)
    return plugin


def _signature_problems(plugin: Any) -> Iterator[tuple[str, str]]:
    """Hooks that pluggy would drop in silence or only complain of vaguely: misspelt, with unknown arguments, as wrappers."""
    for name in dir(plugin):
        function = getattr(plugin, name, None)
        options = getattr(function, _IMPLEMENTATION, None)
        if not isinstance(options, dict):
            continue
        hook = options.get("specname") or name
        if hook not in HOOKS:
            guess = closest(hook, HOOKS)
            yield f"'{hook}' is no hook", f"Did you mean '{guess}'? The hooks are {', '.join(HOOKS)}" if guess else f"The hooks are {', '.join(HOOKS)}"
            continue
        if hook != EVENT_HOOK and (options.get("wrapper") or options.get("hookwrapper")):
            yield f"{hook} is marked as a wrapper", "Provider hooks yield records and are never wrappers: use plain @hookimpl"
        known = {"event"} if hook == EVENT_HOOK else set()
        given = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]  # type: ignore[arg-type]
        unknown = [p for p in given if p not in known]
        if unknown:
            takes = "only 'event'" if known else "no arguments"
            yield f"{hook} has unknown argument(s) {', '.join(unknown)}", f"It takes {takes}"
