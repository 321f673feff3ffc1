"""Runs from disk on the small model that fail in their last block and are resumed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from quark.algorithms import Hessian, Metrics, RoundingTask, RoundToNearest, Statistic
from quark.checkpoint import ExportOptions
from quark.checkpoint.atomic_directory import finished_blocks
from quark.config.model import QConfig
from quark.errors import QuarkError
from quark.runs.from_disk import Output, journaled, opened_checkpoint
from quark.runs.identity import RunIdentity
from quark.runs.journal import Journal
from quark.runs.quantize_block import quantize_blocks
from quark.runs.quantize_run import finish_run
from quark.runs.run import plan_run
from quark.runs.selected_algorithms import Algorithms
from quark_devkit.check import NotApplicableError, require
from quark_devkit.small_models import batches, saved
from quark_devkit.whole_runs import contents, first_difference

__all__ = ["require_same_when_resumed"]


class _InterruptedError(QuarkError):
    """The end of a run that is going to be resumed."""


class _Interrupted(RoundToNearest):
    """Rounds to nearest when it has seen the inputs of layers, up to some number of tasks.

    Args:
        most: Tasks after which it fails.

    Attributes:
        inputs: The Hessian of the input of each task.
    """

    needs: ClassVar[tuple[type[Statistic], ...]] = (Hessian,)

    def __init__(self, most: int | None = None) -> None:
        self.inputs: list[Tensor] = []
        self._most = most

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        if len(self.inputs) == self._most:
            raise _InterruptedError("interrupted")
        self.inputs.append(task.statistic(Hessian).matrix().clone())
        return super().round(task)


def require_same_when_resumed(config: QConfig, layout: str, options: ExportOptions | None = None) -> None:
    """Require that a run that fails in its last block and is resumed writes the bytes of one that does not.

    A finished block whose bytes are damaged is noticed and quantized again.

    Args:
        config: Of the run.
        layout: Name of an exporter.
        options: Of the export.

    Raises:
        NotApplicableError: The exporter cannot resume.
    """
    options = options or ExportOptions()
    with tempfile.TemporaryDirectory() as temporary:
        source, once = saved(Path(temporary) / "float"), Path(temporary) / "once"
        whole = _quantize(source, once, config, layout, options)
        for damaged in (False, True):
            out = Path(temporary) / ("damaged" if damaged else "resumed")
            partial_output = _interrupted(source, out, config, layout, options, len(whole.inputs) - 1)
            count = finished_blocks(partial_output) if partial_output is not None else 0
            require(count, "has no finished blocks after a failure in the last one: 'when_stored' has to call its argument")
            assert partial_output is not None
            if damaged:
                _spoil(partial_output)
            resumed = _quantize(source, out, config, layout, options, resume=True)
            different = first_difference(contents(once), contents(out))
            how = "a damaged block" if damaged else "its finished blocks"
            require(different is None, f"gives another {different} when a run is resumed from {how}")
            is_again = len(resumed.inputs) == len(whole.inputs)
            require(is_again == damaged, "takes a damaged block for a finished one" if damaged else "forgets the finished blocks")
            same = all(torch.equal(a, b) for a, b in zip(reversed(resumed.inputs), reversed(whole.inputs), strict=False))
            fix = "'read' has to give what was written"
            require(same, f"gives layers of the last block other inputs when a run is resumed from {how}: {fix}")


def _interrupted(source: Path, out: Path, config: QConfig, layout: str, options: ExportOptions, most: int) -> Path | None:
    """Let a run fail behind ``most`` tasks, and return its unfinished output; None where there is none."""
    with suppress(_InterruptedError):
        _quantize(source, out, config, layout, options, most)
    return next(out.parent.glob(f".{out.name}.*"), None)


def _quantize(
    source: Path, out: Path, config: QConfig, layout: str, options: ExportOptions, most: int | None = None, *, resume: bool = False
) -> _Interrupted:
    """Quantize a checkpoint as `quark.runs.quantize_checkpoint` does; return the rounding, which may fail."""
    output = Output.of(out, layout, options, resume=resume)
    if not output.writer.resumes:
        raise NotApplicableError("it does not resume: its runs start from the beginning")
    rounding = _Interrupted(most)
    shards, tensors = opened_checkpoint(source)
    run = attrs.evolve(plan_run(tensors.model, config), algorithms=Algorithms(rounding=rounding))
    run = run.with_data(tensors.model, batches(), tensors.device)
    tensors.prepare(run.plan)
    identity = RunIdentity.of(tensors.model, run.plan, shards, run.data, layout, options, [], tensors.device)
    with output.opened() as directory, journaled(run, tensors, output, directory, identity) as (started, sink):
        finish_run(started, sink, quantize_blocks(started, sink))
    return rounding


def _spoil(partial_output: Path) -> None:
    """Let the journal say that the first finished block was stored with other bytes."""
    journal = Journal.read(partial_output)
    first, *others = journal.finished
    journal.cut(0)
    journal.add(attrs.evolve(first, checksums={name: f"not {checksum}" for name, checksum in first.checksums.items()}))
    for block in others:
        journal.add(block)
