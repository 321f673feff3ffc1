"""Runs from a checkpoint to a checkpoint, with one block in memory at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs
from torch import nn

from quark.base.log import get_logger
from quark.base.ranks import ALONE, Ranks
from quark.base.torch_state import own_torch_state
from quark.checkpoint.atomic_directory import Leftover, finished_blocks, refuse_unfinished_run
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.destination import refuse_used_directory
from quark.checkpoint.export import exporter_of, exporting, refuse_unstorable
from quark.checkpoint.exporter import BlockStream, Exporter, ExportOptions
from quark.checkpoint.inspection import refuse_incomplete_export
from quark.checkpoint.run_file import complete_run_file
from quark.config.model import QConfig
from quark.errors import ConfigError, OutputError, UnsupportedError
from quark.models.hf.loading import torch_device, torch_dtype
from quark.models.hf.quantized_source import float_tensors_of
from quark.models.hf.shards import Shard, check_shards
from quark.models.hf.skeleton import skeleton
from quark.models.hf.stored_tensors import StoredTensors
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import weight_converters_of
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins.attribution import attributed, origin
from quark.plugins.run_events import running
from quark.runs.identity import RunIdentity, is_finished_run, refuse_changed_source, refuse_different_ranks
from quark.runs.journal import Journal
from quark.runs.quantize_block import quantize_blocks
from quark.runs.quantize_run import finish_run, quantize_run, start_run
from quark.runs.run import Data, Run, plan_run
from quark.runs.selected_algorithms import settings_told
from quark.runs.sink import BlockSink, CheckpointSink, IdleSink, InPlaceSink, JournaledSink, ReadingSink, SharedSink, opened_stream
from quark.runs.skeleton import quantized_skeleton
from quark.runs.source import CheckpointSource
from quark.runs.started_run import FinishedRun, StartedRun

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter

Report = Callable[[FinishedRun, Path, str, Callable[[], CheckpointSource]], None]
"""Writes files about a run into its complete checkpoint, which may still be renamed.

Of the run, the checkpoint, the torch device of the run, and a function that opens the float checkpoint once
more; `quark_workbench.report.ReportOptions` is one.
"""


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    config: QConfig,
    data: Data = None,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    exporter: str = "safetensors",
    options: ExportOptions | None = None,
    weight_converters: Sequence[WeightConverter] | None = None,
    trust_remote_code: bool = False,
    resume: bool = False,
    restart: bool = False,
    report: Report | None = None,
    ranks: Ranks = ALONE,
) -> QuantPlan:
    """Quantize a checkpoint.

    The result is what loading, `ModelQuantizer.quantize_model` and an export give, byte for byte.

    Only what lies in no decoder block, and one block are in memory, but for exporters and transforms that
    need the whole model. Blocks that are finished when a run is killed or fails stay, beside a journal; the
    same call with ``resume=True`` goes on with the next one, and does nothing where ``out`` is finished.

    Args:
        source: Directory of a checkpoint in Hugging Face form: float, or quantized in a layout that an
            installed plugin dequantizes.
        out: Directory to write; it must not exist, be empty, or hold what ``options.overwrite`` lets be
            replaced. It appears when complete.
        config: What each layer gets.
        data: Calibration data (see `quark.calibration.batches.calls`), or a function that gives them to what
            needs them, if anything does.
        device: Torch device to work on.
        dtype: Of the float model: a key of float32, bfloat16, float16; ``auto`` takes what the checkpoint
            says.
        exporter: Name of an exporter.
        options: Of the export, those of the exporter's own among them.
        weight_converters: What stored tensors become before they are the model's
            (``transformers.core_model_loading`` and `quark.models.hf.weight_converters`); None: a template's.
        trust_remote_code: Whether code that comes with the checkpoint may run.
        resume: Whether to go on from the finished blocks of an earlier run to ``out``; without any, the run
            starts from the beginning.
        restart: Whether to discard finished blocks of an earlier run to ``out``.
        report: Writes the report of the finished run beside the weights; None writes none.
        ranks: The processes that share the run and its files
            (`quark.base.process_group.ranks_of_environment`).

    Returns:
        What was done to each layer; where nothing was left to do, what was planned.

    Raises:
        OutputError: ``out`` is in use, another process is writing to it, or it cannot be written.
        ResumeError: Finished blocks lie there and nothing is said of them, or they, or ``out``, are of
            another run; what differs is named.
        CheckpointError: The checkpoint is damaged, incomplete, or of another model than its config.json says.
        ConfigError, UnknownNameError, UnsupportedError, CalibrationError: What is asked for is not there,
            does not fit, or lacks data.
        RankError: Another rank has failed, or has been asked for something else.
        NonFiniteError: A weight or an activation holds NaN or Inf.
        PluginError: A plugin raised an error, or returned what cannot be built on; names plugin, version,
            algorithm and layer.
    """
    told = {"source": str(source), "out": str(out), **settings_told(config)}
    with own_torch_state(takes_turns=ranks.size == 1), running("quantize", speaks=ranks.is_first, **told) as events:
        events.phase("plan")
        output = Output.of(Path(out), exporter, options or ExportOptions(), Path(source), resume=resume, restart=restart, ranks=ranks)
        opened = functools.partial(opened_checkpoint, Path(source), device, dtype, weight_converters, trust_remote_code=trust_remote_code)
        shards, tensors = opened()
        run = plan_run(tensors.model, config, tensors.codes_of, tensors.carried)
        output.refuse_to_resume(run)
        output.refuse_unstorable(tensors.model, run.plan)
        run = run.with_data(tensors.model, data, tensors.device, ranks, events)
        tensors.prepare(run.plan)
        converters = weight_converters_of(tensors.model) if weight_converters is None else weight_converters
        of_output = exporter, output.options
        identity = RunIdentity.of(tensors.model, run.plan, shards, run.data, *of_output, converters, tensors.device, ranks.is_deterministic)
        refuse_different_ranks(ranks, identity, leftover=output.leftover)

        def complete(finished: FinishedRun, directory: Path) -> None:
            refuse_changed_source(ranks, identity, shards)
            if not ranks.is_first:
                return
            refuse_incomplete_export(exporter, directory, tensors.model)
            if report is not None:
                events.phase("report")
                report(finished, directory, str(tensors.device), lambda: opened()[1])
            complete_run_file(directory, attrs.asdict(identity))

        with closing(tensors):
            if output.is_finished(identity):
                plan = run.plan
            elif not run.algorithms.works_by_block or not output.writer.streams:
                plan = _whole(run, tensors, output, complete)
            else:
                with output.opened() as directory:
                    with streamed(run, tensors, output, directory, identity) as (started, sink):
                        finished = finish_run(started, sink, quantize_blocks(started, sink))
                    complete(finished, directory)
                plan = finished.content.plan
        events.exported(output.path, exporter)
    return plan


@attrs.frozen(eq=False)
class Output:
    """The output of a run: its directory, exporter and options.

    Attributes:
        path: The output directory.
        exporter: Name of the exporter.
        writer: The exporter.
        options: Options of the export.
        leftover: Whether finished blocks of an earlier run are resumed or discarded, or refuse the run.
        ranks: The processes that write to it. The first makes its directory and gives it its name.
        source: The float checkpoint, copies of whose files may lie there.
    """

    path: Path
    exporter: str
    writer: Exporter
    options: ExportOptions
    leftover: Leftover = "refuse"
    ranks: Ranks = ALONE
    source: Path | None = None

    @classmethod
    def of(
        cls,
        path: Path,
        exporter: str,
        options: ExportOptions,
        source: Path | None = None,
        *,
        resume: bool = False,
        restart: bool = False,
        ranks: Ranks = ALONE,
    ) -> Self:
        """Return the output, after checks that a run may write to it.

        Arguments and errors as of `quantize_checkpoint`.
        """
        if resume and restart:
            raise ConfigError("resume goes on from the finished blocks of an earlier run, and restart discards them: set one of the two")
        leftover: Leftover = "resume" if resume else "restart" if restart else "refuse"
        if ranks.is_first:  # the locks that are tried would look to the other ranks like those of another run
            refuse_used_directory(path, exporter, overwrite=options.overwrite, resume=resume, source=source)
            refuse_unfinished_run(path, leftover)
        return cls(path, exporter, exporter_of(exporter, options), options, leftover, ranks, source)

    def is_finished(self, identity: RunIdentity) -> bool:
        """Return whether a run that is to be resumed, the one of that identity, has nothing left to do.

        Raises as `is_finished_run`.
        """
        if self.leftover != "resume":
            return False
        is_finished = self.ranks.is_first and is_finished_run(self.path, identity, overwrite=self.options.overwrite)
        if is_finished:
            get_logger().info(f"'{self.path}' is finished: this very run has written it, and there is nothing left to do.")
        return self.ranks.broadcast(is_finished)

    def built(self) -> AbstractContextManager[Path]:
        """Return the context of the directory that the first rank writes to, which becomes the output."""
        return exporting(self.exporter, self.path, overwrite=self.options.overwrite, leftover=self.leftover, source=self.source)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yield the directory to write to, which becomes the output, on every rank."""
        if not self.ranks.is_first:
            directory = Path(self.ranks.broadcast(""))
            if not directory.is_dir():
                raise OutputError(
                    f"rank {self.ranks.rank} cannot see '{directory}', in which rank 0 builds the output: all processes need the same "
                    "file system, under the same path"
                )
            yield directory
            return
        with self.built() as directory:
            self.ranks.broadcast(str(directory.absolute()))
            yield directory

    def refuse_unstorable(self, model: nn.Module, plan: QuantPlan) -> None:
        """Raise UnsupportedError if the layout cannot hold the model, which is on the meta device."""
        content = CheckpointContent(model, plan.config, plan)
        refuse_unstorable(self.exporter, self.writer, content, quantized_skeleton(model, plan), self.options)

    def has_journal(self, run: Run) -> bool:
        """Return whether a run enters its finished blocks in a journal, from which it can be resumed."""
        return run.algorithms.works_by_block and self.writer.resumes and not self.is_divided(run)

    def is_divided(self, run: Run) -> bool:
        """Return whether each block is one rank's.

        That is so where there are several, and no calibration forward has to pass all blocks.
        """
        return self.ranks.size > 1 and not run.needs_data

    def is_shared(self, run: Run) -> bool:
        """Return whether each rank writes its own blocks."""
        return self.writer.shares and self.is_divided(run)

    def refuse_to_resume(self, run: Run) -> None:
        """Raise UnsupportedError if a run that keeps no journal is to resume."""
        if self.leftover != "resume" or self.has_journal(run):
            return
        reason = f"the exporter '{self.exporter}' cannot go on with an export of another process (it does not say resumes = True)"
        if not run.algorithms.works_by_block:
            reason = "an algorithm of it changes the whole model, so that nothing is written before all of it is quantized"
        elif self.is_divided(run):
            reason = f"nothing in it needs calibration data, and {self.ranks.size} processes divide its blocks without a journal of them"
        raise UnsupportedError(f"this run cannot be resumed: {reason}. Leave out resume=True (--resume); it starts from the beginning")


def opened_checkpoint(
    source: Path,
    device: str = "cpu",
    dtype: str = "auto",
    converters: Sequence[WeightConverter] | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[Sequence[Shard], CheckpointSource]:
    """Return the files of a checkpoint, and its tensors with the model on the meta device.

    Nothing has been read but headers.

    Arguments and errors as of `quantize_checkpoint`.
    """
    torch_dtype(dtype)
    shards = check_shards(source)
    target = torch_device(device)
    model = skeleton(source, dtype, target, trust_remote_code=trust_remote_code)
    converters = weight_converters_of(model) if converters is None else converters
    return shards, CheckpointSource(model, StoredTensors(model, shards, source, converters, float_tensors_of(source, shards)), target)


@contextmanager
def streamed(
    run: Run, tensors: CheckpointSource, output: Output, directory: Path, identity: RunIdentity
) -> Iterator[tuple[StartedRun, BlockSink]]:
    """Start a run, or go on with an interrupted one; yield it, and its sink.

    The sink writes each block as soon as it is quantized, and enters it in a journal if the run keeps one.

    Args:
        run: With its data.
        tensors: The checkpoint, prepared for the plan of the run.
        output: Where to write to.
        directory: That becomes the output; one with finished blocks is gone on with.
        identity: Of the run.
    """
    journal = Journal.read(directory.parent) if run.ranks.is_first and finished_blocks(directory.parent) else None
    if journal is not None:
        journal.refuse_other_run(identity)
        journal.remove_later_files(directory)
    two_passes = run.ranks.broadcast(None if journal is None else journal.two_passes)
    if two_passes is not None:
        run = run.in_memory_mode(two_passes)
    started = start_run(run, tensors.model, tensors)
    with _opened_stream(started, output, directory, is_resumed=two_passes is not None) as stream:
        if run.ranks.is_first and journal is None and output.has_journal(run):
            journal = Journal.begin(directory, identity, two_passes=run.two_passes)
        yield started, _sink(started, output, stream, journal)


@contextmanager
def _opened_stream(started: StartedRun, output: Output, directory: Path, *, is_resumed: bool) -> Iterator[BlockStream | None]:
    """Yield the export on each rank that writes to its files, or reads finished blocks from them."""
    ranks = started.run.ranks
    if not ranks.is_first:
        ranks.barrier()  # the first rank has made the files then
    if not (ranks.is_first or is_resumed or output.is_shared(started.run)):
        yield None
        return
    with opened_stream(started, output.writer, directory, output.options) as stream:
        if ranks.is_first:
            ranks.barrier()
        yield stream


def _sink(started: StartedRun, output: Output, stream: BlockStream | None, journal: Journal | None) -> BlockSink:
    """Return the sink that a rank hands its blocks to.

    In a run with calibration data every rank comes to the same layers, and the first one writes them.
    Without, each block is one rank's, which reads, rounds and writes it; if the exporter cannot share its
    files (`quark.checkpoint.Exporter.shares`), all are the first one's.
    """
    run, model = started.run, started.model
    sink: CheckpointSink
    if stream is not None and output.is_shared(run):
        sink = SharedSink(started, stream)
    elif stream is None:
        return IdleSink(model) if output.is_divided(run) else InPlaceSink(model)
    elif not run.ranks.is_first:
        return ReadingSink(model, stream)
    elif journal is not None:
        sink = JournaledSink(model, stream, journal, decoder_blocks(model, started.plan.architecture))
    else:
        sink = CheckpointSink(model, stream)
    if run.ranks.is_first:
        sink.begin()
    return sink


def _whole(run: Run, tensors: CheckpointSource, output: Output, complete: Callable[[FinishedRun, Path], None]) -> QuantPlan:
    """Read the whole model, quantize it in memory, then write it; of several ranks, the first does.

    ``complete`` gets the checkpoint before it has its name; the other ranks call it, too.
    """
    model = tensors.model
    run.events.phase("load")
    tensors.load_all()
    finished = quantize_run(run, model, InPlaceSink(model))
    content = finished.content
    if not run.ranks.is_first:
        complete(finished, output.path)
        return content.plan
    run.events.phase("write")
    with output.built() as directory:
        with attributed(f"writing '{output.path}'", origin("exporters", output.exporter)):
            output.writer.export(content, directory, output.options)
        complete(finished, directory)
    return content.plan
