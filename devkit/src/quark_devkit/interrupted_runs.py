"""Runs from disk that fail behind some block, as runs that are killed do, and leave what a resumed run goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quark.errors import QuarkError
from quark.models.plan.decoder_blocks import Block
from quark.runs.sink import BlockResult, JournaledSink

__all__ = ["interrupted_behind"]


class _InterruptedRunError(QuarkError):
    """Ends a run."""


@contextmanager
def interrupted_behind(blocks: int) -> Iterator[None]:
    """Let the run of the body fail when it has finished that many blocks, and end quietly.

    Raises:
        AssertionError: The run has ended before; or it keeps no journal, and so cannot be resumed.
    """
    end_block, count = JournaledSink.end_block, 0

    def failing(sink: JournaledSink, block: Block | None, result: BlockResult) -> None:
        nonlocal count
        if count == blocks:
            raise _InterruptedRunError
        count += 1
        end_block(sink, block, result)

    JournaledSink.end_block = failing  # type: ignore[method-assign, assignment]
    try:
        yield
    except _InterruptedRunError:
        return
    finally:
        JournaledSink.end_block = end_block  # type: ignore[method-assign]
    raise AssertionError(f"the run has ended before it had finished {blocks} blocks, or it keeps no journal")
