"""Reading ahead: the tensors of the next block are read in a thread while one is worked on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["ReadAhead"]

K = TypeVar("K")
V = TypeVar("V")


class ReadAhead(Generic[K, V]):
    """Reads at most one thing ahead.

    The thread lives from `start` to `take`, so that none is left where a run fails in between; what it raises, `take` raises.

    Args:
        read: Reads the thing of a key.
    """

    def __init__(self, read: Callable[[K], V]) -> None:
        self._read = read
        self._ahead: tuple[K, Future[V]] | None = None

    def start(self, key: K) -> None:
        """Begin to read the thing of a key in a thread; what was read ahead and not taken is dropped."""
        self.stop()
        executor = ThreadPoolExecutor(1, thread_name_prefix="quark-read-ahead")
        self._ahead = key, executor.submit(self._read, key)
        executor.shutdown(wait=False)  # the thread ends when it has read

    def take(self, key: K) -> V:
        """Return the thing of a key, which is read now if it was not read ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != key:
            if ahead is not None:
                _ended(ahead[1])
            return self._read(key)
        return ahead[1].result()

    def stop(self) -> None:
        """Wait for the thread, and drop what it has read."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            _ended(ahead[1])


def _ended(future: Future[V]) -> None:
    """Wait until a thread has ended, whatever it raised: nobody wants its result."""
    if not future.cancel():
        future.exception()
