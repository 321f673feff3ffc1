"""BlockEvents: tells listeners of the blocks of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from quark.calibration.report import CalibrationReport
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.plan_row import PlanRow
from quark.plugins.run_events import RunEvents
from quark.runs.sink import BlockResult, BlockSink


@attrs.define(eq=False, slots=False)
class BlockEvents:
    """Tells listeners of the blocks of a run.

    Args:
        events: Events of the run.
        report: Holds the metrics of each finished block.
        blocks: All blocks, in order.
        finished: The result of each block that an interrupted run has finished; None for the others.
        sink: Says which blocks this process quantizes if no forwards pass them.
        has_forwards: Whether calibration forwards pass all blocks.
    """

    _events: RunEvents
    _report: CalibrationReport
    _blocks: Sequence[Block]
    _finished: Sequence[BlockResult | None]
    _sink: BlockSink
    _has_forwards: bool

    def __attrs_post_init__(self) -> None:
        self._outcomes: list[str] = []
        sizes = []
        for block, result in zip(self._blocks, self._finished, strict=True):
            is_own = self._has_forwards or self._sink.wants(block)
            self._outcomes.append("resumed" if result is not None else "done" if is_own else "other process")
            is_next = self._outcomes[-1] == "done" and self._events.is_heard
            sizes.append(sum(p.nbytes for p in block.module.parameters()) if is_next else 0)
        self._events.expect(sizes)

    @contextmanager
    def block(self, number: int, rows: Sequence[PlanRow]) -> Iterator[None]:
        """Report that a block starts, and, if the body succeeds, that it is finished.

        ``rows`` are its layers to quantize.
        """
        name = self._blocks[number].name or "model"
        self._events.block_started(name, number)
        yield
        known = self._report.blocks.get(name, {})
        self._events.block_finished(self._outcomes[number], known.get("seconds"), lambda: self._figures(known, rows))

    def _figures(self, known: dict[str, Any], rows: Sequence[PlanRow]) -> dict[str, Any]:
        """Return the metrics of a block, the fields of `quark.plugins.BlockFinished`."""
        weights = self._report.weights
        ratios = {row.name: ratio for row in rows if (ratio := weights.get(row.name, {}).get("snr_db")) is not None}
        figures: dict[str, Any] = {"bytes": known.get("bytes"), "layers": len(rows)}
        if ratios:
            worst = min(ratios, key=lambda name: ratios[name])
            figures |= {"snr_db": statistics.median(ratios.values()), "worst": worst, "worst_snr_db": ratios[worst]}
        return figures
