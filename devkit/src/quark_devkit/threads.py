"""Threads: sets torch's number of threads, and runs ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from quark.base.ranks import Group, Ranks
from quark.errors import RankError

__all__ = ["in_threads", "threads"]

T = TypeVar("T")

_TIMEOUT = 60.0
"""Seconds that a rank waits for other ranks."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads to ``count`` inside the body.

    Checks compute small tensors on one thread: on a machine with other load, threads that wait for each other
    take thirty times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_threads(work: Callable[[Ranks], T], size: int, *, is_deterministic: bool = False) -> list[T]:
    """Run ``work`` on ``size`` ranks, each in a thread of this process, and return the results by rank.

    Each rank needs its own model, created in ``work``.

    Args:
        work: Function that each rank calls.
        size: Number of ranks.
        is_deterministic: See `quark.base.ranks.Ranks`.

    Raises:
        BaseException: The exception that ``work`` raised on the first rank that failed.
    """
    meeting = _Meeting(size)
    errors: dict[int, BaseException] = {}
    result_of: dict[int, T] = {}

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            group: Group | None = _Place(meeting, rank) if size > 1 else None
            result_of[rank] = work(Ranks(rank, size, is_deterministic, group))
        except BaseException as error:
            errors[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    before = torch.get_num_threads()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    causes = [error for _, error in sorted(errors.items()) if not isinstance(error, RankError)]
    if errors:
        raise (causes or list(errors.values()))[0]
    return [result_of[rank] for rank in range(size)]


class _Meeting:
    """The place where the ranks exchange data."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.left: list[Any] = [None] * size


class _Place:
    """The `quark.base.ranks.Group` of one rank."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def gather(self, data: bytes) -> list[bytes]:
        """See `quark.base.ranks.Group.gather`."""
        return self._exchanged(data)

    def gather_tensors(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """See `quark.base.ranks.Group.gather_tensors`."""
        return self._exchanged(x)

    def sum_(self, x: Tensor) -> None:
        """See `quark.base.ranks.Group.sum_`."""
        x.copy_(torch.stack(self._exchanged(x.clone())).sum(0))  # a clone: other ranks read it while this one writes

    def _exchanged(self, data: T) -> list[T]:
        """Return the data of all ranks, by rank."""
        self._meeting.left[self._rank] = data
        self._wait()
        everything = list(self._meeting.left)
        self._wait()
        return everything

    def _wait(self) -> None:
        try:
            self._meeting.barrier.wait(_TIMEOUT)
        except threading.BrokenBarrierError:
            raise RankError("another rank has failed") from None
