"""RunEvents: tells listeners what a run does.

Whatever works on a run tells it here; programs and plugins listen.
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
    """Measures the rate of work, and estimates the time of the rest.

    Args:
        work: Of each piece, in any unit, such as the bytes of a block; 0 for a piece that is not worked on
            here.

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
        """Count a piece, 0 for the first, as done in these seconds; pieces without work do not count."""
        if self._work[number] > 0:
            self._done += self._work[number]
            self._took += seconds
            self._left -= self._work[number]

    @property
    def seconds(self) -> float | None:
        """How long the other pieces will take; None before the first piece with work is done."""
        return self._took * max(self._left, 0.0) / self._done if self._done else None


_Item = TypeVar("_Item")
_Block = TypeVar("_Block", bound=Any)


class RunEvents:
    """Tells listeners about one run. Where nobody listens, no event is made.

    Args:
        task: What the run does, as of `quark.plugins.Event`.
        speaks: Whether anything is told at all; of several processes, only the first speaks.
        now: Returns the time in seconds.
    """

    def __init__(self, task: str, speaks: bool = True, now: Callable[[], float] = time.perf_counter) -> None:
        self._task, self._speaks, self._now = task, speaks, now
        self._begin = now()
        self._phase: tuple[str, str | None] = ("", None)
        self._block: dict[str, Any] = {}  # fields of the events of the block that is on
        self._block_begin = self._begin
        self._total = 0
        self._left = TimeLeft(())

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens."""
        return self._speaks and is_heard()

    def tell(self, kind: type[Event], **fields: Any) -> None:
        """Pass an event of that kind to the listeners."""
        if self.is_heard:
            emit(kind(task=self._task, elapsed=self._now() - self._begin, **fields))

    def phase(self, name: str) -> None:
        """Tell that another kind of work begins, in the block that is on; nothing where it is on already."""
        if not self._speaks:
            return
        phase = name, self._block.get("block")
        if phase != self._phase:
            self._phase = phase
            self.tell(PhaseStarted, phase=name, block=phase[1])

    def expect(self, work: Sequence[float]) -> None:
        """Set out for some blocks, in order; see `TimeLeft`."""
        if self._speaks:
            self._total, self._left = len(work), TimeLeft(work)

    def block_started(self, name: str, number: int) -> None:
        """Tell that a block is worked on; 0 is the number of the first."""
        if not self._speaks:
            return  # one silent voice is shared by all
        self._block = {"block": name, "number": number + 1, "total": self._total}
        self._block_begin = self._now()
        self.tell(BlockStarted, **self._block)

    def block_finished(
        self,
        outcome: str = "done",
        phases: Mapping[str, float] | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell that the block is finished; arguments as of `BlockFinished`."""
        if not self._block:
            return
        seconds = self._now() - self._block_begin
        self._left.finish(self._block["number"] - 1, seconds)
        times = {"seconds": seconds, "seconds_left": self._left.seconds, "phases": phases or {}}
        self.tell(BlockFinished, **self._block, **times, outcome=outcome, figures=figures or {})
        self._block = {}

    def blocks(self, blocks: Sequence[_Block]) -> Iterator[_Block]:
        """Yield blocks, and tell of each before it is worked on and when the next is asked for.

        Each has a ``name`` and a ``module``.
        """
        self.expect([sum(p.nbytes for p in block.module.parameters()) for block in blocks] if self.is_heard else [0] * len(blocks))
        for number, block in enumerate(blocks):
            self.block_started(block.name or "model", number)
            yield block
            self.block_finished()

    def batches(self, items: Iterable[_Item], of: object) -> Iterator[_Item]:
        """Yield the items, and tell of each when the next is asked for.

        Their total is the length of ``of``, where that has one.
        """
        total = len(of) if isinstance(of, Sized) else None
        left, since = TimeLeft([1.0] * (total or 0)), self._now()
        for number, item in enumerate(items):
            yield item
            now = self._now()
            if total is not None:
                left.finish(number, now - since)
            since = now
            self.tell(BatchFinished, number=number + 1, total=total, seconds_left=left.seconds)

    def exported(self, path: Path, exporter: str) -> None:
        """Tell that an export is complete."""
        if self.is_heard:
            sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
            self.tell(Exported, path=str(path), exporter=exporter, bytes=sum(sizes), files=len(sizes))


SILENT = RunEvents("", speaks=False)
"""Events of work inside another run, or of none: nothing is told."""
_current = threading.local()


@contextmanager
def running(task: str, *, speaks: bool = True, **facts: Any) -> Iterator[RunEvents]:
    """Yield the voice of a run: it has begun, and ends with this context, well or by an error.

    A run inside another one is silent.

    While it lasts, logged warnings are told to listeners. The distribution quark-workbench has the listener
    that draws a bar on a terminal, and writes lines into the log; without it no progress is shown.

    Args:
        task: What the run does, as of `quark.plugins.Event`.
        speaks: As of `RunEvents`.
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
    """Tells listeners of logged warnings."""

    def __init__(self, events: RunEvents) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on."""
        self._events.tell(Warned, message=record.getMessage(), level=record.levelname, logger=record.name)
