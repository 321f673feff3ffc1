"""Ranks in one process: a thread for each, so that a test or a check need start no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from quark.base.ranks import Group, Ranks
from quark.errors import RankError

__all__ = ["in_threads"]

T = TypeVar("T")

_TIMEOUT = 60.0
"""Seconds that a rank waits for the others."""


def in_threads(work: Callable[[Ranks], T], size: int, *, is_deterministic: bool = False) -> list[T]:
    """Return ``[work(ranks)]`` for each of so many ranks, which run in threads of this process.

    Ranks share nothing by this but what they exchange: each needs a model of its own, made in ``work``.

    Args:
        work: What each rank does.
        size: How many ranks there are.
        is_deterministic: As of `quark.base.ranks.Ranks`.

    Raises:
        BaseException: What ``work`` has raised on the first rank that has failed.
    """
    meeting = _Meeting(size)
    results: list[T] = []
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
    results += [result_of[rank] for rank in range(size)]
    return results


class _Meeting:
    """Where the ranks leave what they exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.left: list[bytes] = [b""] * size
        self.terms: list[Tensor | None] = [None] * size


class _Place:
    """The `quark.base.ranks.Group` of one rank."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def gather(self, data: bytes) -> list[bytes]:
        """As `quark.base.ranks.Group.gather`."""
        self._meeting.left[self._rank] = data
        self._wait()
        everything = list(self._meeting.left)
        self._wait()
        return everything

    def gather_tensors(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """As `quark.base.ranks.Group.gather_tensors`."""
        self._meeting.terms[self._rank] = x
        self._wait()
        everything = [each for each in self._meeting.terms if each is not None]
        self._wait()
        return everything

    def sum_(self, x: Tensor) -> None:
        """As `quark.base.ranks.Group.sum_`."""
        self._meeting.terms[self._rank] = x
        self._wait()
        total = torch.stack([term for term in self._meeting.terms if term is not None]).sum(0)
        self._wait()
        x.copy_(total)

    def _wait(self) -> None:
        try:
            self._meeting.barrier.wait(_TIMEOUT)
        except threading.BrokenBarrierError:
            raise RankError("another rank has failed") from None
