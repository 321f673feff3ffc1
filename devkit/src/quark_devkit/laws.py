"""Laws for every kind of plugin: results are the same in any process, and the work leaves nothing behind.

Each kind has a function that makes a subject work once and returns the results (`Work`). The checks call this
function in this process and in a fresh process. The fresh process has an empty environment, another hash seed
and another working directory. It first loads the plugin on the meta device in bfloat16, as transformers does
when it builds a model. Then it repeats the work in other default dtypes and on other numbers of threads.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.base.lazy import LazyRef
from quark.plugins import Catalog
from quark.plugins.catalog import catalog
from quark_devkit.check import Check, check, require
from quark_devkit.extent import SLOW, is_thorough, thoroughly
from quark_devkit.fresh_process import in_fresh_process
from quark_devkit.option_effects import digest
from quark_devkit.process_state import changes, shared_state
from quark_devkit.side_effects import prints_reach_stdout
from quark_devkit.subject import Subject, find_subject
from quark_devkit.threads import threads
from quark_devkit.works import KNOWN_WORKS, PREPARATIONS, WORKS, Work

__all__ = ["laws_of"]

EXACT = ("format", "observer", "scheme", "dataset", "metric")
"""Kinds whose results have the same bits on any number of threads. Other kinds may sum in another order."""
IN_CALLERS_STATE = ("format", "observer", "scheme", "metric", "layout")
"""Kinds that programs call in their own default dtype. For others, the core or the layers set the dtype."""
THREADS = (3, 2, 4, 5)
DTYPES = (torch.bfloat16, torch.float64)
CHANCE = 0.005
"""Share of elements that may differ if more threads sum products in another order."""
_SHOWN = 3


@attrs.frozen
class Observation:
    """The observations of a subject's work in a fresh process.

    Attributes:
        first: Digests of the first results, by name.
        again: Digests of the second results.
        by_dtype: Digests of the results, by the default dtype of the process.
        other_threads: Results that differ on other numbers of threads, each as ``"'values' on 3 threads"``.
        changed: Names of the state of the process that the work changed.
        alive: Tensors, modules and open files that are left after the work is done a second time.
        printed: Text that the process wrote to stdout.
    """

    first: Mapping[str, str]
    again: Mapping[str, str]
    by_dtype: Mapping[str, Mapping[str, str]]
    other_threads: tuple[str, ...]
    changed: tuple[str, ...]
    alive: tuple[str, ...]
    printed: str


def laws_of(kind: str) -> tuple[Check, ...]:
    """Return the checks of these laws for one kind of subjects."""

    def observed(subject: Subject) -> Observation:
        return _observed(kind, subject.lookup_name, is_thorough(), subject.catalog, subject.registry.revision)

    @check(kind, since=2)
    def does_the_same_in_a_fresh_process(subject: Subject) -> None:
        """Results in a fresh process are the same, to the bit. That process has an empty environment and
        another hash seed, and first loads the plugin on the meta device in bfloat16."""
        seen, here = observed(subject).first, _digests(KNOWN_WORKS.get(kind, WORKS[kind])(subject))
        _require_same(
            here, seen, "in a fresh process, with an empty environment and another hash seed, loaded on the meta device in bfloat16"
        )

    @check(kind, since=2)
    def does_the_same_again(subject: Subject) -> None:
        """If the plugin does the same work twice, the results are the same, to the bit."""
        seen = observed(subject)
        _require_same(seen.first, seen.again, "the second time")

    @check(kind, since=2)
    def does_the_same_in_any_default_dtype(subject: Subject) -> None:
        """Results do not depend on torch's default dtype, which a program sets to build its models."""
        seen = observed(subject)
        for dtype, results in seen.by_dtype.items():
            _require_same(seen.first, results, f"with {dtype} as the default dtype: name the dtype of every tensor that you make")

    @check(kind, since=2)
    def does_the_same_on_any_number_of_threads(subject: Subject) -> None:
        """Results do not depend on torch's number of threads, except that sums in matrix products may be in
        another order."""
        different = observed(subject).other_threads
        require(not different, f"gives other {_some(different)}")

    @check(kind, since=2)
    def leaves_the_process_as_it_was(subject: Subject) -> None:
        """Code of the plugin changes no shared state when it is loaded and used: logging, warnings, torch's
        defaults, threads, random states, the environment, classes of other packages."""
        changed = observed(subject).changed
        require(not changed, f"changes {_some(changed)}: all code of the process shares that state")

    @check(kind, since=2)
    def keeps_nothing_alive(subject: Subject) -> None:
        """After its work, the plugin keeps no tensor, no module and no open file, because a long run would
        fill the memory."""
        alive = observed(subject).alive
        require(not alive, f"keeps {_some(alive)} alive after its work")

    @check(kind, since=2)
    def prints_nothing(subject: Subject) -> None:
        """Code of the plugin writes nothing to stdout when it is loaded and used, since that would break
        ``--json``."""
        printed = observed(subject).printed
        require(not printed, f"writes {printed[:80]!r} to stdout: use logging")

    by_dtype = (does_the_same_in_any_default_dtype,) if kind in IN_CALLERS_STATE else ()
    of_process = (does_the_same_on_any_number_of_threads, leaves_the_process_as_it_was, keeps_nothing_alive, prints_nothing)
    return (does_the_same_in_a_fresh_process, does_the_same_again, *by_dtype, *of_process)


@lru_cache(maxsize=4)
def _observed(kind: str, name: str, thorough: bool, plugins: Catalog, revision: object) -> Observation:
    return in_fresh_process(_observe, kind, name, thorough)


def _observe(kind: str, name: str, thorough: bool) -> Observation:
    with redirect_stdout(io.StringIO()) as printed, prints_reach_stdout(), thoroughly(thorough):
        observation = _observe_work(kind, name, thorough)
    return attrs.evolve(observation, printed=printed.getvalue())


def _observe_work(kind: str, name: str, thorough: bool) -> Observation:
    """Return the observations of a subject's work in this process. This process must not have loaded the
    subject before."""
    work = WORKS[kind]
    _warm_up(kind)
    sys.path[:] = map(os.path.abspath, sys.path)
    os.chdir(tempfile.gettempdir())
    with _empty_environment(), threads(THREADS[-1]):
        before = shared_state()
        _load_on_meta(find_subject(catalog(), kind, name))
        loaded = changes(before, shared_state())
    with _empty_environment(), threads(1):
        subject, before = find_subject(catalog(), kind, name), shared_state()
        begin, first = time.process_time(), work(subject)
        is_slow = not thorough and time.process_time() - begin > SLOW
        count = 1 if is_slow else len(THREADS)
        changed = dict.fromkeys([*loaded, *changes(before, shared_state())])
        known, files, digests = _large_objects(), _open_files(), _digests(first)
        again = _digests(work(subject))
        alive = (*_alive_beside(known), *(f"the open file '{name}'" for name in _open_files() - files))
        dtypes, counts = DTYPES[:count] if kind in IN_CALLERS_STATE else (), THREADS[:count]
        if is_slow and dtypes and _digests_in(dtypes[0], counts[0], kind, subject) == digests:
            dtypes, counts = (), ()
        by_dtype = {str(dtype): _digests(_with_default_dtype(dtype, work, subject)) for dtype in dtypes}
        other_threads, of_threads = _on_threads(kind, subject, first, counts)
    return Observation(digests, again, by_dtype, tuple(other_threads), tuple(dict.fromkeys([*changed, *of_threads])), alive, "")


def _warm_up(kind: str) -> None:
    """Use torch once, so that the effects of torch's first use are not attributed to the plugin."""
    layer, x = nn.Linear(64, 64), torch.randn(2, 64)
    layer(x).square().mean().backward()
    torch.linalg.cholesky(torch.eye(4))
    with torch.device("meta"):
        torch.ones(2).clamp_(min=0)  # some versions import the compiler here, which sets loggers and variables
    if kind == "quant_mode":  # modes may trace models, for which torch sets loggers and variables
        torch.export.export(layer, (x,))


@contextmanager
def _empty_environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _load_on_meta(subject: Subject) -> None:
    """Load the code of the record on the meta device in bfloat16, as transformers does."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            for field in attrs.fields(type(subject.record)):
                if isinstance(getattr(subject.record, field.name), LazyRef) and hasattr(subject.registry, f"load_{field.name}"):
                    subject.load(field.name)
            if subject.kind in PREPARATIONS:
                PREPARATIONS[subject.kind](subject)
    finally:
        torch.set_default_dtype(torch.float32)


def _with_default_dtype(dtype: torch.dtype, work: Work, subject: Subject) -> Mapping[str, Any]:
    torch.set_default_dtype(dtype)
    try:
        return work(subject)
    finally:
        torch.set_default_dtype(torch.float32)


def _digests_in(dtype: torch.dtype, count: int, kind: str, subject: Subject) -> dict[str, str] | None:
    """Return digests of the results with another default dtype and, at the same time, another number of
    threads.

    If these digests equal those of the first results, the results depend on neither the dtype nor the
    threads. Return None if the work fails or changes the number of threads.
    """
    with suppress(Exception), threads(count) if kind in EXACT else _said_to_be(count):
        results = _digests(_with_default_dtype(dtype, WORKS[kind], subject))
        return results if torch.get_num_threads() == count else None
    return None


def _on_threads(kind: str, subject: Subject, first: Mapping[str, Any], counts: Sequence[int]) -> tuple[list[str], list[str]]:
    """Return two lists: the results that differ on other numbers of threads, and the changes that the work
    made to this number."""
    different, changed = [], []
    for count in counts:
        with threads(count) if kind in EXACT else _said_to_be(count):
            results = WORKS[kind](subject)
            changed += ["torch's number of threads"] if torch.get_num_threads() != count else []
        alike = (name for name, value in first.items() if _is_alike(value, results.get(name), kind in EXACT))
        different += [f"'{name}' on {count} threads" for name in first.keys() - set(alike)]
    return different, changed


@contextmanager
def _said_to_be(count: int) -> Iterator[None]:
    """Make torch report ``count`` threads but use one, because small layers are slow on several threads."""
    before, said = (torch.get_num_threads, torch.set_num_threads), threading.local()
    torch.get_num_threads = lambda: getattr(said, "count", count)
    torch.set_num_threads = lambda nthreads: setattr(said, "count", nthreads)
    try:
        yield
    finally:
        torch.get_num_threads, torch.set_num_threads = before


def _is_alike(one: Any, other: Any, is_exact: bool) -> bool:
    if is_exact or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return digest(one) == digest(other)
    if one.shape != other.shape:
        return False
    near = torch.isclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
    return float((~near).double().mean()) <= CHANCE if near.numel() else True


def _large_objects() -> list[Any]:
    """Return weak references to all tensors and modules."""
    return [weakref.ref(one) for one in _tensors_and_modules()]


def _alive_beside(known: list[Any]) -> tuple[str, ...]:
    """Return descriptions of the tensors and modules that exist now and are not in ``known``."""
    before = {id(one()) for one in known}
    new = [one for one in _tensors_and_modules() if id(one) not in before]
    return tuple(f"a tensor {list(one.shape)}" if isinstance(one, Tensor) else f"a {type(one).__name__}" for one in new)


def _open_files() -> Counter[str]:
    """Return how often each file is open in this process. On systems that do not list open files, the result
    is empty."""
    links = Path("/proc/self/fd")
    found: Counter[str] = Counter()
    for link in os.listdir(links) if links.is_dir() else ():
        with suppress(OSError):  # the descriptor that listed them is closed by now
            found[os.readlink(links / link)] += 1
    return Counter({name: count for name, count in found.items() if name.startswith("/") and not name.startswith("/dev/")})


def _tensors_and_modules() -> list[Any]:
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor | nn.Module)]  # proxies report another __class__


def _digests(results: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(value) for name, value in results.items()}


def _require_same(one: Mapping[str, str], other: Mapping[str, str], when: str) -> None:
    different = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    require(not different, f"gives other {_some(tuple(different))} {when}")


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
