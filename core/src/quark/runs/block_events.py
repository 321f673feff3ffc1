"""BlockEvents: tells of each block that it is worked on, and of its figures when it is finished."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quark.calibration.report import CalibrationReport
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.plan_row import PlanRow
from quark.plugins.run_events import RunEvents
from quark.runs.sink import BlockResult, BlockSink

__all__ = ["BlockEvents"]


class BlockEvents:
    """Tells listeners of the blocks of a run.

    Args:
        events: Of the run.
        report: Has what was measured of a block when it is finished.
        blocks: All blocks, in order.
        finished: The result of each block that an interrupted run has finished; None for the others.
        sink: Says which blocks are another process's, where no forwards pass them.
        has_forwards: Whether calibration forwards pass all blocks.
    """

    def __init__(
        self,
        events: RunEvents,
        report: CalibrationReport,
        blocks: Sequence[Block],
        finished: Sequence[BlockResult | None],
        sink: BlockSink,
        has_forwards: bool,
    ) -> None:
        self._events, self._report, self._blocks = events, report, blocks
        is_own = [has_forwards or sink.wants(block) for block in blocks]
        self._outcomes = [
            "resumed" if result is not None else "done" if own else "other process" for result, own in zip(finished, is_own, strict=True)
        ]
        is_done = (outcome == "done" and events.is_heard for outcome in self._outcomes)
        events.expect([sum(p.nbytes for p in b.module.parameters()) if done else 0 for b, done in zip(blocks, is_done, strict=True)])

    @contextmanager
    def block(self, number: int, rows: Sequence[PlanRow]) -> Iterator[None]:
        """Tell that a block is worked on, and, where the body succeeds, that it is finished; ``rows`` are its layers to quantize."""
        name = self._blocks[number].name or "model"
        self._events.block_started(name, number)
        yield
        known = self._report.blocks.get(name, {})
        self._events.block_finished(self._outcomes[number], known.get("seconds"), lambda: self._figures(known, rows))

    def _figures(self, known: dict[str, Any], rows: Sequence[PlanRow]) -> dict[str, Any]:
        """Return the figures of a block, as of `quark.plugins.BlockFinished`."""
        weights = self._report.weights
        ratios = {row.name: ratio for row in rows if (ratio := weights.get(row.name, {}).get("snr_db")) is not None}
        figures: dict[str, Any] = {"bytes": known.get("bytes"), "layers": len(rows)}
        if ratios:
            worst = min(ratios, key=lambda name: ratios[name])
            figures |= {"snr_db": statistics.median(ratios.values()), "worst": worst, "worst_snr_db": ratios[worst]}
        return figures
