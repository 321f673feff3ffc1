"""Whole runs on the small model: from disk or in memory, on one rank or two, interrupted or resumed."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import Hessian, Metrics, RoundingTask, RoundToNearest, Validation
from quark.base.ranks import Ranks
from quark.calibration.report import CalibrationReport
from quark.checkpoint import ExportOptions, import_model_from_safetensors
from quark.checkpoint.atomic_directory import finished_blocks
from quark.checkpoint.destination import RUN_FILE
from quark.checkpoint.export import export_with
from quark.config.model import QConfig
from quark.errors import QuarkError
from quark.models.hf.loading import load_model
from quark.models.plan.decoder_blocks import Block
from quark.plugins import ExporterRecord, exporters
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.runs.from_disk import CheckpointRun, opened_checkpoint
from quark.runs.identity import RunIdentity
from quark.runs.journal import Journal
from quark.runs.output import Output
from quark.runs.quantize_block import quantize_blocks, quantize_run
from quark.runs.run import plan_run
from quark.runs.selected_algorithms import Algorithms
from quark.runs.sink import BlockResult, InPlaceSink, JournaledSink
from quark.runs.started_run import finish_run
from quark_devkit.check import assume, complaining, require
from quark_devkit.fresh_process import in_fresh_process
from quark_devkit.small_models import BLOCKS, batches, logits, saved, small_model
from quark_devkit.threads import in_threads

__all__ = [
    "contents",
    "every_validation",
    "first_difference",
    "interrupted_behind",
    "is_same",
    "readable_layout",
    "require_copies",
    "require_reload",
    "require_same_after_resume",
    "require_same_by_two_ranks",
    "require_same_from_disk",
    "require_same_logits",
    "require_same_when_resumed",
    "shared_report",
]


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file of an export by its relative path, without the run's identity file."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != RUN_FILE]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def first_difference(one: Mapping[str, object], other: Mapping[str, object]) -> str | None:
    """Return the first key that has different values in two mappings; None if the mappings are equal."""
    return min((name for name in {*one, *other} if one.get(name) != other.get(name)), default=None)


def readable_layout() -> str:
    """Return the name of the most capable registered layout that streams and can be loaded.

    Layouts that can be resumed come first, then layouts that keep all values, then layouts whose checkpoints
    can be sources of runs.

    Raises:
        NotApplicableError: There is no such layout.
    """
    found = [record for record in exporters() if record.reader is not None and "streaming" in record.capabilities]
    assume(found, "no registered checkpoint layout streams and is read back: install quark-exporters")

    def completeness(record: ExporterRecord) -> tuple[bool, bool, bool]:
        return "resumable" in record.capabilities, "rounds_scales" not in record.capabilities, record.dequantizer is not None

    return max(found, key=completeness).name


def require_same_from_disk(config: QConfig, layout: str | None = None, options: ExportOptions | None = None) -> None:
    """Require that a checkpoint that is quantized from disk equals one that is quantized in memory, byte for
    byte.

    Args:
        config: Config of the run.
        layout: Name of an exporter; None for `readable_layout`.
        options: Options of the export.
    """
    layout = readable_layout() if layout is None else layout
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        source = saved(Path(temporary) / "float")
        disk, memory = Path(temporary) / "disk", Path(temporary) / "memory"
        quantize_checkpoint(source, disk, config, batches(), exporter=layout, options=options)
        model = ModelQuantizer(config).quantize_model(load_model(source), batches())
        export_with(layout, model, memory, options)
        different = first_difference(contents(disk), contents(memory))
        require(different is None, f"gives a different {different} from disk than in memory")


def require_same_after_resume(config: QConfig) -> None:
    """Require that a run that fails after its first block and is then resumed writes the same bytes as a
    complete run.

    Each of the three runs is a separate process, so that state in classes and modules is lost. Every
    validation accepts the change that a transform or a tuning makes, so that each block shows whether state
    was lost.

    Args:
        config: Config of the run.

    Raises:
        NotApplicableError: No registered layout can be both loaded and resumed.
    """
    layout = readable_layout()
    assume("resumable" in exporters().get(layout).capabilities, f"an export in the layout '{layout}' cannot be resumed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        source = saved(Path(temporary) / "float")
        whole, resumed = Path(temporary) / "whole", Path(temporary) / "resumed"
        for out, part in ((whole, "whole"), (resumed, "first"), (resumed, "rest")):
            in_fresh_process(_run_part, source, out, config, layout, part)
        different = first_difference(contents(whole), contents(resumed))
        require(different is None, f"gives a different {different} if its run is resumed after the first block")


def _run_part(source: Path, out: Path, config: QConfig, layout: str, part: str) -> None:
    """Quantize a checkpoint in one of three ways.

    ``"whole"`` is a complete run, ``"first"`` is a run that fails after one block, and ``"rest"`` resumes
    that run.
    """
    with every_validation(is_improvement=True), interrupted_behind(1) if part == "first" else nullcontext():
        quantize_checkpoint(source, out, config, batches(), exporter=layout, resume=part == "rest")


@contextmanager
def every_validation(*, is_improvement: bool) -> Iterator[None]:
    """Make every validation on held-out tokens find an improvement, or find none, whatever the errors are."""
    with mock.patch.object(Validation, "is_improvement", property(lambda _: is_improvement)):
        yield


def require_same_by_two_ranks(config: QConfig) -> None:
    """Require that two ranks, each with half of the data, compute the same tensors and the same report as one
    rank alone, to the bit.

    Args:
        config: Config of the deterministic run.
    """

    models = [small_model() for _ in range(3)]  # created here, since creation is not thread-safe

    def quantized_by(ranks: Ranks) -> dict[str, Any]:
        model = models.pop()
        run = plan_run(model, config).with_data(model, batches(), torch.device("cpu"), ranks)
        content = quantize_run(run, model, InPlaceSink(model)).content
        return {**model.state_dict(), "the report": shared_report(model.quark_report), "the plan": content.plan.to_dict()}  # type: ignore[arg-type]

    (alone,) = in_threads(quantized_by, 1, is_deterministic=True)
    for rank, other in enumerate(in_threads(quantized_by, 2, is_deterministic=True)):
        different = sorted(name for name in {*alone, *other} if not is_same(alone.get(name), other.get(name)))
        require(not different, f"gives a different {different[0] if different else ''} on rank {rank} of two than in one process")


def shared_report(report: CalibrationReport) -> dict[str, Any]:
    """Return the part of a report that is equal on all ranks.

    Times, and figures that a rank computes from its own samples, are left out.
    """
    of_a_rank = ("weights", "histograms", "blocks", "seconds")
    return {**{name: value for name, value in report.to_dict().items() if name not in of_a_rank}, "figures of": sorted(report.weights)}


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal. Tensors must also have the same dtype."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return bool(one == other)


def require_reload(
    model: nn.Module, layout: str, read: Callable[[Path], nn.Module] | None = None, options: ExportOptions | None = None
) -> None:
    """Require that a quantized model has the same logits, to the bit, after it is exported and read back.

    Args:
        model: The quantized model.
        layout: Name of an exporter.
        read: Reads the checkpoint; None for quark's own reader.
        options: Options of the export.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        out = Path(temporary) / "out"
        export_with(layout, model, out, options)
        require_same_logits(model, out, read, "" if options is None else f" ({options})")


def require_copies(model: nn.Module, logits_of: Callable[[nn.Module], Tensor] = logits) -> None:
    """Require that a quantized model can be copied deeply, and sent to another process, with the same logits.

    Args:
        model: The quantized model.
        logits_of: A function that returns the logits of a model. Another process must be able to import it.
    """
    wanted = logits_of(model)
    for how, compute in (
        ("copied deeply", lambda: logits_of(copy.deepcopy(model))),
        ("pickled", lambda: in_fresh_process(logits_of, model)),
    ):
        with complaining(f"makes a model that cannot be {how}", Exception):
            found = compute()
        require(torch.equal(found, wanted), f"makes a model that has other logits once it is {how}")


def require_same_logits(model: nn.Module, directory: Path, read: Callable[[Path], nn.Module] | None = None, how: str = "") -> None:
    """Require that the model that is read back from an export has the logits of the quantized model, to the
    bit.

    Args:
        model: The quantized model.
        directory: Directory of the export.
        read: Reads the checkpoint; None for quark's own reader.
        how: Kind of the export, for the message.
    """
    again = import_model_from_safetensors(None, directory, device="cpu") if read is None else read(directory)
    one, other = logits(model), logits(again)
    difference = float((one.float() - other.float()).abs().max())
    require(torch.equal(one, other), f"gives logits that differ by up to {difference:.3g} after its export is read back{how}")


class _InterruptedRunError(QuarkError):
    """An error that makes a run fail on purpose."""


@contextmanager
def interrupted_behind(blocks: int) -> Iterator[None]:
    """Make the run in the body fail after ``blocks`` blocks, and suppress the error.

    Raises:
        AssertionError: The run ended before that, or it writes no journal and so cannot be resumed.
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
    raise AssertionError(f"the run ended before it finished {blocks} blocks, or it writes no journal")


class _Recording(RoundToNearest):
    """Records the inputs of layers, then rounds to nearest.

    Attributes:
        inputs: The Hessian of the layers' input, for each task.
    """

    needs = (Hessian,)

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        self.inputs.append(task.statistic(Hessian).matrix().clone())
        return super().round(task)


def require_same_when_resumed(config: QConfig, layout: str, options: ExportOptions | None = None) -> None:
    """Require that a run that fails in its last block and is then resumed writes the same bytes as a complete
    run.

    Also require that a finished block that is damaged is detected and quantized again.

    Args:
        config: Config of the run.
        layout: Name of an exporter.
        options: Options of the export.

    Raises:
        NotApplicableError: The exporter cannot resume.
    """
    options = options or ExportOptions()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        source, once = saved(Path(temporary) / "float"), Path(temporary) / "once"
        whole = _recorded(source, once, config, layout, options)
        for damaged in (False, True):
            out = Path(temporary) / ("damaged" if damaged else "resumed")
            with interrupted_behind(BLOCKS - 1):
                _recorded(source, out, config, layout, options)
            partial_output = next(out.parent.glob(f".{out.name}.*"), out)
            is_begun = finished_blocks(partial_output)
            require(is_begun, "has no finished blocks after a failure in the last block: 'when_stored' must call its argument")
            if damaged:
                _spoil(partial_output)
            resumed = _recorded(source, out, config, layout, options, resume=True)
            different = first_difference(contents(once), contents(out))
            how = "a damaged block" if damaged else "its finished blocks"
            require(different is None, f"gives a different {different} when a run is resumed from {how}")
            is_again = len(resumed.inputs) == len(whole.inputs)
            require(is_again == damaged, "takes a damaged block for a finished one" if damaged else "forgets the finished blocks")
            same = all(torch.equal(a, b) for a, b in zip(reversed(resumed.inputs), reversed(whole.inputs), strict=False))
            fix = "'read' must return the data that was written"
            require(same, f"gives layers of the last block different inputs if a run is resumed from {how}: {fix}")


def _recorded(source: Path, out: Path, config: QConfig, layout: str, options: ExportOptions, *, resume: bool = False) -> _Recording:
    """Quantize a checkpoint with round-to-nearest, as `quark.runs.quantize_checkpoint` does. Return the
    rounding, which has recorded the inputs."""
    output = Output.of(out, layout, options, resume=resume)
    assume(output.writer.resumes, "it does not resume, so a resumed run starts from the beginning")
    rounding = _Recording()
    shards, tensors = opened_checkpoint(source)
    run = attrs.evolve(plan_run(tensors.model, config), algorithms=Algorithms(rounding=rounding))
    run = run.with_data(tensors.model, batches(), tensors.device)
    tensors.prepare(run.plan)
    identity = RunIdentity.of(tensors.model, run.plan, shards, run.data, layout, options, [], tensors.device)
    planned = CheckpointRun(run, lambda: opened_checkpoint(source), shards, tensors, output, identity)
    with output.opened() as directory, planned.streamed(directory) as (started, sink):
        finish_run(started, sink, quantize_blocks(started, sink))
    return rounding


def _spoil(partial_output: Path) -> None:
    """Change the checksums of the first finished block in the journal, so that the block seems damaged."""
    journal = Journal.read(partial_output)
    first, *others = journal.finished
    journal.cut(0)
    journal.add(attrs.evolve(first, checksums={name: f"not {checksum}" for name, checksum in first.checksums.items()}))
    for block in others:
        journal.add(block)
