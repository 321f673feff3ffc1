"""RunFigures: collects the time, bytes and errors of each block. They go into the report of the run and to
the listeners.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from quark.calibration.lockstep import BlockRun
from quark.calibration.model_error import ModelError
from quark.calibration.phases import PhaseClock
from quark.calibration.plugin_checks import StartedTransform
from quark.calibration.report import CalibrationReport
from quark.models.plan.decoder_blocks import Block
from quark.models.plan.plan_row import PlanRow
from quark.plugins.run_events import SILENT, RunEvents

OUTSIDE = "(outside the blocks)"
"""The name that the report uses for the layers outside all blocks."""


@attrs.define(eq=False)
class RunFigures:
    """Collects the metrics of each block in the report of a run, and tells listeners about the blocks.

    Attributes:
        report: The report. Metrics are added to it as JSON values.
        events: Tells listeners about the blocks.
        tokens: The number of tokens in all calibration samples.
        streams: The number of forward passes for each sample.
        clock: Measures the time of each phase of the run.
        model_error: Measures the error of the last block's output.
        flops: Lower bound of the number of floating-point operations that the statistics of the current block
            need.
    """

    report: CalibrationReport
    events: RunEvents = SILENT
    tokens: int = 0
    streams: int = 1
    clock: PhaseClock = attrs.field(factory=PhaseClock)
    model_error: ModelError = attrs.field(factory=ModelError)
    flops: int = 0

    def expect(self, blocks: Sequence[Block], outcomes: Sequence[str]) -> None:
        """Tell listeners the sizes of all blocks, so that they can estimate the remaining time.

        The values of ``outcomes`` are those of `quark.plugins.BlockFinished`.
        """
        is_heard = self.events.is_heard
        self.events.expect([size_of(b) if is_heard and outcome == "done" else 0 for b, outcome in zip(blocks, outcomes, strict=True)])

    @contextmanager
    def block(self, number: int, block: Block, layers: int, outcome: str) -> Iterator[None]:
        """Tell listeners that a block starts and, if the body of the ``with`` statement succeeds, that it has
        ended.

        Args:
            number: Number of the block. The first block has the number 0.
            block: The block.
            layers: The number of layers of the block that are quantized.
            outcome: As in `quark.plugins.BlockFinished`.
        """
        name = block.name or "model"
        self.events.block_started(name, number)
        yield
        known = self.report.blocks.get(name, {})
        figures = {"bytes": known.get("bytes"), "layers": layers, **known.get("weights", {})}
        self.events.block_finished(outcome, known.get("seconds"), figures)

    @contextmanager
    def compared(
        self, block_run: BlockRun | None, block: Block, rows: Sequence[PlanRow], transforms: Sequence[StartedTransform]
    ) -> Iterator[None]:
        """Run the forward passes of `ModelError` through a float block.

        The body of the ``with`` statement must apply the transforms.

        Usually, the forward passes run before the body. The comparison with round-to-nearest then covers the
        transforms too. If there is a transform without data, such as a rotation, the forward passes run after
        the body, because the transform may have changed the basis of the block's input.
        """
        is_before = all(transform.needs for transform in transforms)
        for is_now in (is_before, not is_before):
            if is_now:
                with self.clock.phase("report"):
                    self.model_error.pass_block(block_run, block, rows)
            else:
                yield

    def end_block(self, block: Block | None, size: int, passes: int, counts: Mapping[str, int]) -> None:
        """Add the time, the bytes and the floating-point operations of a finished block to the report.

        Args:
            block: The block, or None for the tensors outside the blocks.
            size: The number of bytes of the block's float tensors.
            passes: How often each forward pass has computed the block.
            counts: For each layer of the block's experts, the number of tokens that reached it.
        """
        name = OUTSIDE if block is None else block.name or "model"
        row: dict[str, Any] = {"bytes": size, "seconds": self.clock.lap()}
        if block is not None and passes:
            row["flops"] = {"forward": passes * self.streams * _products(block, self.tokens, counts), "statistics": self.flops}
        self.flops = 0
        self.report.blocks[name] = row | self.report.blocks.get(name, {})
        self.report.seconds = dict(self.clock.seconds)

    def of_block(self, block: Block, names: Iterable[str], report: CalibrationReport) -> CalibrationReport:
        """Return the ``report`` of one block. It includes the metrics that this object has for the block and
        the layers.
        """
        own = set(names)
        return attrs.evolve(
            report,
            weights={name: figures for name, figures in self.report.weights.items() if name in own},
            histograms={name: histogram for name, histogram in self.report.histograms.items() if name in own},
            blocks={name: row for name, row in self.report.blocks.items() if name == (block.name or "model")},
        )

    def recall(self, report: CalibrationReport) -> None:
        """Add to the clock the time that an interrupted run has spent on a finished block."""
        for row in report.blocks.values():
            self.clock.add(row["seconds"])


def size_of(block: Block) -> int:
    """Return the number of bytes of a block's parameters."""
    return sum(parameter.nbytes for parameter in block.module.parameters())


def _products(block: Block, tokens: int, counts: Mapping[str, int]) -> int:
    """Return the number of floating-point operations of a block's layers in one forward pass of all samples.

    Matrix products inside attention are not counted.
    """
    flops = 0
    for name, module in block.module.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2:
            flops += 2 * weight.numel() * counts.get(f"{block.prefix}{name}", tokens)
    return flops
