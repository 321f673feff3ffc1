"""`RunEvents` sends the events of a run to listeners.

All code that takes part in a run reports its progress to `RunEvents`. Programs and plugins can listen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from quark.base.log import get_logger
from quark.base.shortages import advise
from quark.plugins.catalog import emit, is_heard
from quark.plugins.events import (
    BatchFinished,
    BlockFinished,
    BlockStarted,
    Event,
    Exported,
    PhaseStarted,
    RunFailed,
    RunFinished,
    RunStarted,
    Warned,
)


class TimeLeft:
    """Measures the rate of work, and estimates how long the remaining work takes.

    Args:
        work: Amount of work for each piece, in any unit, such as the bytes of a block. The amount is 0 for a
            piece that this process skips.

    Example:
        >>> left = TimeLeft([10, 30, 30])
        >>> left.seconds
        >>> left.finish(0, seconds=2.0)
        >>> left.seconds                    # 60 units at 5 a second
        12.0
    """

    def __init__(self, work: Sequence[float]) -> None:
        self._work = list(work)
        self._done = 0.0
        self._took = 0.0
        self._left = float(sum(self._work))

    def finish(self, number: int, seconds: float) -> None:
        """Record that a piece took ``seconds``. Ignore a piece without work.

        The first piece has the ``number`` 0.
        """
        if self._work[number] > 0:
            self._done += self._work[number]
            self._took += seconds
            self._left -= self._work[number]

    @property
    def seconds(self) -> float | None:
        """Estimated time for the remaining pieces in seconds, or None until a piece with work is finished."""
        return self._took * max(self._left, 0.0) / self._done if self._done else None


_Item = TypeVar("_Item")
_Block = TypeVar("_Block", bound=Any)


class RunEvents:
    """Sends the events of one run to listeners. If there are no listeners, no event is created.

    Args:
        task: Task of the run, as in `quark.plugins.Event`.
        speaks: Whether to send events at all. If several processes share a run, only the first process sends
            events.
        now: Function that returns the current time in seconds.
    """

    def __init__(self, task: str, speaks: bool = True, now: Callable[[], float] = time.perf_counter) -> None:
        self._task, self._speaks, self._now = task, speaks, now
        self._begin = now()
        self._phase: tuple[str, str | None] = ("", None)
        self._block: dict[str, Any] = {}  # fields of the events of the current block
        self._block_begin = self._begin
        self._total = 0
        self._left = TimeLeft(())

    @property
    def is_heard(self) -> bool:
        """Whether this object sends events and somebody listens to events."""
        return self._speaks and is_heard()

    def tell(self, kind: type[Event], **fields: Any) -> None:
        """Send an event of the class ``kind`` with these fields to the listeners."""
        if self.is_heard:
            emit(kind(task=self._task, elapsed=self._now() - self._begin, **fields))

    def phase(self, name: str) -> None:
        """Send `PhaseStarted` for the phase ``name``, unless the current block is already in this phase."""
        if not self._speaks:
            return
        phase = name, self._block.get("block")
        if phase != self._phase:
            self._phase = phase
            self.tell(PhaseStarted, phase=name, block=phase[1])

    def expect(self, work: Sequence[float]) -> None:
        """Set the work of all blocks, in the order in which they run. See `TimeLeft` for ``work``."""
        if self._speaks:
            self._total, self._left = len(work), TimeLeft(work)

    def block_started(self, name: str, number: int) -> None:
        """Send `BlockStarted` for the block ``name``. The first block has the number 0."""
        if not self._speaks:
            return  # all silent runs share `SILENT`, so it must not change
        self._block = {"block": name, "number": number + 1, "total": self._total}
        self._block_begin = self._now()
        self.tell(BlockStarted, **self._block)

    def block_finished(
        self,
        outcome: str = "done",
        phases: Mapping[str, float] | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """Send `BlockFinished` for the current block. The arguments are fields of `BlockFinished`."""
        if not self._block:
            return
        seconds = self._now() - self._block_begin
        self._left.finish(self._block["number"] - 1, seconds)
        times = {"seconds": seconds, "seconds_left": self._left.seconds, "phases": phases or {}}
        self.tell(BlockFinished, **self._block, **times, outcome=outcome, figures=figures or {})
        self._block = {}

    def blocks(self, blocks: Sequence[_Block]) -> Iterator[_Block]:
        """Yield blocks. Send `BlockStarted` before each block, and `BlockFinished` when the caller asks for
        the next block.

        Each block has the attributes ``name`` and ``module``.
        """
        self.expect([sum(p.nbytes for p in block.module.parameters()) for block in blocks] if self.is_heard else [0] * len(blocks))
        for number, block in enumerate(blocks):
            self.block_started(block.name or "model", number)
            yield block
            self.block_finished()

    def batches(self, items: Iterable[_Item], of: object) -> Iterator[_Item]:
        """Yield the items. Send `BatchFinished` for each item when the caller is done with it.

        If ``of`` has a length, this length is the total number of items. If there are more items, the total
        is the number of items so far.
        """
        total = len(of) if isinstance(of, Sized) else None
        left, since = TimeLeft([1.0] * (total or 0)), self._now()
        for number, item in enumerate(items):
            yield item
            now = self._now()
            if total is not None and number < total:
                left.finish(number, now - since)
            elif total is not None:
                total = number + 1
            since = now
            self.tell(BatchFinished, number=number + 1, total=total, seconds_left=left.seconds)

    def exported(self, path: Path, exporter: str) -> None:
        """Send `Exported` for a complete export in the directory ``path``."""
        if self.is_heard:
            sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
            self.tell(Exported, path=str(path), exporter=exporter, bytes=sum(sizes), files=len(sizes))


SILENT = RunEvents("", speaks=False)
"""A `RunEvents` that sends nothing. It is used for a run inside another run, and for work outside of runs."""
_current = threading.local()


@contextmanager
def running(task: str, *, speaks: bool = True, **facts: Any) -> Iterator[RunEvents]:
    """Yield the `RunEvents` of a run. The run ends when the ``with`` block ends.

    A run inside another run sends no events. During the run, each logged warning is also sent as the event
    `Warned`. The listener of quark-workbench draws a progress bar on a terminal and logs lines about the
    progress. Without a listener, no progress is shown.

    Args:
        task: Task of the run, as in `quark.plugins.Event`.
        speaks: Whether to send events at all, as in `RunEvents`.
        facts: Fields of `quark.plugins.RunStarted`.
    """
    if getattr(_current, "is_running", False):
        yield SILENT
        return
    events = RunEvents(task, speaks)
    _current.is_running = True
    handler = _Warnings(events)
    get_logger().addHandler(handler)
    try:
        events.tell(RunStarted, **facts)
        yield events
    except BaseException as error:
        advise(error)
        events.tell(RunFailed, error=type(error).__name__, message=str(error))
        raise
    else:
        events.tell(RunFinished)
    finally:
        get_logger().removeHandler(handler)
        _current.is_running = False


class _Warnings(logging.Handler):
    """A logging handler that sends each logged warning to the listeners as the event `Warned`."""

    def __init__(self, events: RunEvents) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Send the logged record as the event `Warned`."""
        self._events.tell(Warned, message=record.getMessage(), level=record.levelname, logger=record.name)
