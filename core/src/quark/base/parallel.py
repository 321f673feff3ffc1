"""Functions that spread independent pieces of work over threads. Each thread computes with one torch thread.

An example of independent pieces are the rows of a layer. `parallel_map` is called once for each layer, and
its threads wait for each other once, at the end of this call. Torch's own parallelism would wait for the
slowest thread at the end of every small operation, which is thousands of times for a layer. With
`parallel_map`, a thread that is slow because of other programs processes fewer pieces, and the other threads
process the rest.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

CPU = torch.device("cpu")
SMALL = 1 << 22
"""Number of elements of the largest matrix that one thread processes in a few milliseconds. In float32, such
a matrix has 16 MiB."""

_LOCAL = threading.local()
"""The attribute ``threads`` is the number of threads that `parallel_map` may use while
``torch.get_num_threads()`` is 1. If it is unset or 0, ``torch.get_num_threads()`` applies.
"""


def parallel_map(work: Callable[[Item], Result], items: Sequence[Item], device: torch.device = CPU) -> list[Result]:
    """Return ``[work(item) for item in items]``, computed by ``torch.get_num_threads()`` threads.

    The calling thread is one of these threads.

    One torch thread computes each item, so the results do not depend on the number of threads. Pass more
    items than threads. ``work`` should call few operations on large tensors, because only one thread at a
    time runs Python code. If ``work`` calls `parallel_map` itself, this inner call uses only its own thread.
    On devices other than the CPU, the calling thread computes everything.

    Args:
        work: A function of one item. Its result must not depend on other items. It runs in the caller's grad
            and inference mode.
        items: The items to which ``work`` is applied.
        device: The device of the tensors.

    Raises:
        BaseException: ``work`` raised this error. If ``work`` failed for several items, the error of the
            first of these items is raised. Items after this item may not have been computed.
    """
    if device.type != "cpu" or _threads() == 1:
        return list(map(work, items))
    workers = min(_threads(), len(items)) - 1
    with one_thread(), _threads_set(0):
        return list(map(work, items)) if workers < 1 else _shared(work, items, workers)


def beside(work: Callable[[], Result], device: torch.device = CPU) -> Callable[[], Result]:
    """Start ``work()``, and return a function that waits for the result and returns it.

    Inside `coarsely`, another thread runs ``work``, and the returned function raises the exceptions of
    ``work``. Otherwise `beside` itself runs ``work`` before it returns.
    """
    if device.type != "cpu" or torch.get_num_threads() > 1 or _threads() == 1:
        result = work()
        return lambda: result
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def in_mode() -> Result:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return work()

    return _POOL.submit(in_mode, 1)[0].result


@contextmanager
def one_thread(device: torch.device = CPU) -> Iterator[None]:
    """Inside the ``with`` block, torch operations on the CPU use only the calling thread."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def coarsely(elements: int, device: torch.device = CPU) -> Iterator[None]:
    """Inside the ``with`` block, compute torch operations in one thread.

    `parallel_map` still uses all threads. Use this context for many operations, one after another, on
    matrices that have at most ``elements`` elements. If ``elements`` is more than `SMALL`, the context has no
    effect.
    """
    before = _threads()
    if device.type != "cpu" or before == 1 or elements > SMALL:
        yield
        return
    with one_thread(), _threads_set(before):
        yield


def _threads() -> int:
    return getattr(_LOCAL, "threads", 0) or torch.get_num_threads()


@contextmanager
def _threads_set(number: int) -> Iterator[None]:
    before = getattr(_LOCAL, "threads", 0)
    _LOCAL.threads = number
    try:
        yield
    finally:
        _LOCAL.threads = before


def row_slices(rows: int, length: int, elements: int) -> list[slice]:
    """Split the rows of a matrix into slices, and return them. A slice can be an item of `parallel_map`.

    The slices have nearly equal sizes. A slice has at most ``elements`` elements, or one row if a row is
    longer.
    """
    most = max(1, elements // max(1, length))
    size = max(1, -(-rows // max(1, -(-rows // most))))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _shared(work: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    numbers = itertools.count()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def take_turns() -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            while not errors and (number := next(numbers)) < len(items):
                try:
                    results[number] = work(items[number])
                except BaseException as error:
                    errors[number] = error

    futures = _POOL.submit(take_turns, workers)
    try:
        take_turns()
    finally:
        wait(futures)
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(items))]


class _Pool:
    """Python threads in which torch computes with one thread each.

    The threads start on first use and end with the process.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all threads. A forked process calls this method, because the threads of its parent do not run
        in it."""
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._size = 0

    def submit(self, task: Callable[[], Result], times: int) -> list[Future[Result]]:
        """Start ``task`` in ``times`` threads, and return a future for each of them."""
        with self._lock:
            if self._executor is None or times > self._size:
                self._start(times)
            assert self._executor is not None
            return [self._executor.submit(task) for _ in range(times)]

    def _start(self, size: int) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        threads = torch.get_num_threads()
        all_started = threading.Barrier(size + 1)

        def begin() -> None:
            torch.set_num_threads(1)
            all_started.wait()

        self._executor, self._size = ThreadPoolExecutor(size, "quark", begin), size
        try:
            for _ in range(size):
                self._executor.submit(int)
        except BaseException:  # the system has no more threads
            all_started.abort()
            self._executor = None
            raise
        all_started.wait()
        # Each thread has its own number of torch threads, but new threads get the number that was set last,
        # in whichever thread.
        torch.set_num_threads(threads)


_POOL = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.forget)
