"""Runs functions in a fresh process that has the plugins of this process. Classes and modules have the state
that they have just after import.

A server process imports torch and transformers once, lives as long as this process, and forks for each call,
except on Windows.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import importlib_metadata

from quark.plugins import Catalog, Record, Source, hookimpl, using
from quark.plugins.catalog import catalog
from quark.plugins.discovery import GROUP, Candidate
from quark.plugins.registries import KINDS
from quark_devkit.check import NotApplicableError

__all__ = ["in_fresh_process"]

T = TypeVar("T")

_PRELOADED = ("quark.runs", "quark_devkit.whole_runs", "transformers.models.llama.modeling_llama")
_OTHER_SEEDS = ("19", "4")
"""Hash seeds. Fresh processes get the first seed that this process does not have, so that sets have another
order."""
_TIMEOUT = 600
"""Timeout of a process in seconds."""


def in_fresh_process(work: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a fresh process that has the plugins of this process, and return the result.

    Args:
        work: A function at the top level of a module. The function, its arguments and its result are pickled.
        *arguments: Arguments of the function.

    Raises:
        NotApplicableError: A plugin of this process is an object that cannot be pickled.
        BaseException: The exception that ``work`` raises.
    """
    sources = tuple(source for source in catalog().sources() if source.module)
    try:
        added = bytes(ForkingPickler.dumps(_added(catalog())))  # not the view: in a reference cycle of an error, its buffer cannot be freed
    except Exception as error:  # a plugin's objects may raise anything
        raise NotApplicableError(f"a plugin of the running program cannot be sent to another process ({error})") from None
    context = _context()
    with ProcessPoolExecutor(1, mp_context=context, initializer=_look_in, initargs=(_places(),)) as process:
        with _without_main():
            result = process.submit(_work, sources, added, work, arguments)
        answer: T = result.result(_TIMEOUT)
        return answer


def _context() -> BaseContext:
    """Return the context that starts processes.

    Processes are forks of a server that has already imported the packages. On Windows, they are spawned.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    seed = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = _OTHER_SEEDS[seed == _OTHER_SEEDS[0]]
    try:
        importlib.import_module("multiprocessing.forkserver").ensure_running()  # not every system has this module
    finally:
        os.environ.pop("PYTHONHASHSEED") if seed is None else os.environ.update(PYTHONHASHSEED=seed)
    return context


def _view_of(mapping: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(mapping)


def _reduced(view: Any) -> tuple[Any, ...]:
    return _view_of, (dict(view),)


ForkingPickler.register(MappingProxyType, _reduced)


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep this program's main module from being imported in processes that the body starts.

    That import could run the whole program again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _added(plugins: Catalog) -> list[tuple[Source, list[Record]]]:
    """Return the records of plugins that the running program has added, by source. These plugins have no
    entry point."""
    by_source: dict[Source, list[Record]] = {}
    for registry in plugins.registries.values():
        for claim in registry.claims():
            if not claim.source.module:
                by_source.setdefault(claim.source, []).append(claim.record)
    return list(by_source.items())


def _places() -> list[str]:
    """Return the directories of this process's import path, and the directories of packages that were
    imported from elsewhere."""
    packages = [module for name, module in list(sys.modules.items()) if "." not in name]
    places = {str(Path(place).parent) for module in packages for place in getattr(module, "__path__", ())}
    return [*sys.path, *sorted(places.difference(sys.path))]


def _look_in(places: Sequence[str]) -> None:
    sys.path.extend(place for place in places if place not in sys.path)


def _work(sources: Sequence[Source], added: bytes, work: Callable[..., T], arguments: Sequence[Any]) -> T:
    from quark_devkit.runner import quietly
    from quark_devkit.threads import threads

    entry_points = [importlib_metadata.EntryPoint(source.entry_point, source.module, GROUP) for source in sources]
    plugins = Catalog(Candidate(source, point) for source, point in zip(sources, entry_points, strict=True))
    for source, records in ForkingPickler.loads(added):
        plugins.add(_plugin_of(records), source)
    with using(plugins), quietly(), threads(1):
        return work(*arguments)


def _plugin_of(records: Sequence[Record]) -> object:
    """Return a plugin that registers these records."""
    hooks: dict[str, Any] = {}
    for kind in KINDS:
        own = [record for record in records if isinstance(record, kind.record)]

        def hook(self: object, own: Sequence[Record] = tuple(own)) -> Sequence[Record]:
            return own

        hook.__name__ = kind.hook
        hooks[kind.hook] = hookimpl(hook)
    return type("AddedPlugin", (), hooks)()
