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

The arguments are the run, the checkpoint, the torch device of the run, and a function that opens the float
checkpoint once more. `quark_workbench.report.ReportOptions` is an example.
"""


Build = Callable[..., nn.Module]
"""Returns the float model of a checkpoint on the meta device, as `quark.models.hf.skeleton.skeleton` does."""


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
    build: Build = skeleton,
) -> QuantPlan:
    """Quantize a checkpoint.

    The result equals that of loading, `ModelQuantizer.quantize_model` and an export, byte for byte.

    One decoder block at a time is in memory, besides the tensors outside the blocks. Some exporters and
    transforms need the whole model.

    If a run fails or is killed, its finished blocks and a journal stay on the disk. The same call with
    ``resume=True`` continues with the next block; if ``out`` is finished, it does nothing.

    Args:
        source: Directory of a checkpoint in Hugging Face form: float, or quantized in a layout that an
            installed plugin dequantizes.
        out: Directory to write. It must not exist or must be empty, unless ``options.overwrite`` is set. It
            appears when it is complete.
        config: The quantization configuration.
        data: Calibration data (see `quark.calibration.batches.calls`), or a function that returns them. The
            function is called only if something needs data.
        device: Torch device to work on.
        dtype: Dtype of the float model: float32, bfloat16 or float16; ``auto`` takes the checkpoint's dtype.
        exporter: Name of an exporter.
        options: Options of the export, including the exporter's own options.
        weight_converters: Conversions from stored tensors to the model's tensors
            (``transformers.core_model_loading`` and `quark.models.hf.weight_converters`). None takes those of
            the template.
        trust_remote_code: Whether code that comes with the checkpoint may run.
        resume: Whether to continue after the finished blocks of an earlier run to ``out``. If there are none,
            the run starts from the beginning.
        restart: Whether to discard finished blocks of an earlier run to ``out``.
        report: Writes the report of the finished run beside the weights; None writes none.
        ranks: The processes that share the run and its files
            (`quark.base.process_group.ranks_of_environment`).
        build: Makes the model without its weights; by default the class that config.json names.

    Returns:
        The plan as it was carried out. If ``out`` was already finished, the plan of the run.

    Raises:
        OutputError: ``out`` is in use, another process is writing to it, or it cannot be written.
        ResumeError: ``out`` has finished blocks, but neither ``resume`` nor ``restart`` is set. Or the blocks
            or ``out`` belong to another run; the message names the differences.
        CheckpointError: The checkpoint is damaged, incomplete, or does not fit its config.json.
        ConfigError, UnknownNameError, UnsupportedError, CalibrationError: A setting is wrong, unknown or
            unsupported, or calibration data are missing.
        RankError: Another rank has failed, or was started with other settings.
        NonFiniteError: A weight or an activation holds NaN or Inf.
        PluginError: A plugin raised an error or returned an invalid result. The message names the plugin, its
            version, the algorithm and the layer.
    """
    told = {"source": str(source), "out": str(out), **settings_told(config)}
    with own_torch_state(takes_turns=ranks.size == 1), running("quantize", speaks=ranks.is_first, **told) as events:
        events.phase("plan")
        output = Output.of(Path(out), exporter, options or ExportOptions(), Path(source), resume=resume, restart=restart, ranks=ranks)
        opened = functools.partial(
            opened_checkpoint, Path(source), device, dtype, weight_converters, trust_remote_code=trust_remote_code, build=build
        )
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
        leftover: Whether finished blocks of an earlier run are resumed or discarded, or stop the run.
        ranks: The processes that write to it. The first creates its directory and renames it at the end.
        source: The float checkpoint. The output may have copies of its files.
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

        Arguments and errors are those of `quantize_checkpoint`.
        """
        if resume and restart:
            raise ConfigError("resume keeps the finished blocks of an earlier run, and restart discards them: set one of the two")
        leftover: Leftover = "resume" if resume else "restart" if restart else "refuse"
        if ranks.is_first:  # other ranks would take the locks of this check for another run's
            refuse_used_directory(path, exporter, overwrite=options.overwrite, resume=resume, source=source)
            refuse_unfinished_run(path, leftover)
        return cls(path, exporter, exporter_of(exporter, options), options, leftover, ranks, source)

    def is_finished(self, identity: RunIdentity) -> bool:
        """Return whether the run of that identity is to be resumed, but is already finished.

        Raises the errors of `is_finished_run`.
        """
        if self.leftover != "resume":
            return False
        is_finished = self.ranks.is_first and is_finished_run(self.path, identity, overwrite=self.options.overwrite)
        if is_finished:
            get_logger().info(f"'{self.path}' is complete: an earlier run with the same settings has written it.")
        return self.ranks.broadcast(is_finished)

    def built(self) -> AbstractContextManager[Path]:
        """Return a context with the directory that the first rank writes to. It becomes the output."""
        return exporting(self.exporter, self.path, overwrite=self.options.overwrite, leftover=self.leftover, source=self.source)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yield, on every rank, the directory to write to. It becomes the output."""
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
        """Raise UnsupportedError if the layout cannot hold the model. The model is on the meta device."""
        content = CheckpointContent(model, plan.config, plan)
        refuse_unstorable(self.exporter, self.writer, content, quantized_skeleton(model, plan), self.options)

    def has_journal(self, run: Run) -> bool:
        """Return whether a run keeps a journal of its finished blocks, so that it can be resumed."""
        return run.algorithms.works_by_block and self.writer.resumes and not self.is_divided(run)

    def is_divided(self, run: Run) -> bool:
        """Return whether each block is quantized by one rank.

        That is so if there are several ranks and no calibration forward has to pass all blocks.
        """
        return self.ranks.size > 1 and not run.needs_data

    def is_shared(self, run: Run) -> bool:
        """Return whether each rank writes its own blocks."""
        return self.writer.shares and self.is_divided(run)

    def refuse_to_resume(self, run: Run) -> None:
        """Raise UnsupportedError if a run is to be resumed but keeps no journal."""
        if self.leftover != "resume" or self.has_journal(run):
            return
        reason = f"the exporter '{self.exporter}' cannot continue an interrupted export (it does not say resumes = True)"
        if not run.algorithms.works_by_block:
            reason = "one of its algorithms changes the whole model, so nothing is written before all of it is quantized"
        elif self.is_divided(run):
            reason = f"it needs no calibration data, and its {self.ranks.size} processes divide the blocks without a journal"
        raise UnsupportedError(f"this run cannot be resumed: {reason}. Leave out resume=True (--resume) to start from the beginning")


def opened_checkpoint(
    source: Path,
    device: str = "cpu",
    dtype: str = "auto",
    converters: Sequence[WeightConverter] | None = None,
    *,
    trust_remote_code: bool = False,
    build: Build = skeleton,
) -> tuple[Sequence[Shard], CheckpointSource]:
    """Return the files of a checkpoint, and its tensors with the model on the meta device.

    Only headers have been read.

    Arguments and errors are those of `quantize_checkpoint`.
    """
    torch_dtype(dtype)
    shards = check_shards(source)
    target = torch_device(device)
    model = build(source, dtype, target, trust_remote_code=trust_remote_code)
    converters = weight_converters_of(model) if converters is None else converters
    return shards, CheckpointSource(model, StoredTensors(model, shards, source, converters, float_tensors_of(source, shards)), target)


@contextmanager
def streamed(
    run: Run, tensors: CheckpointSource, output: Output, directory: Path, identity: RunIdentity
) -> Iterator[tuple[StartedRun, BlockSink]]:
    """Start a run, or continue an interrupted one; yield the run and its sink.

    The sink writes each block as soon as it is quantized, and enters it in the journal if the run keeps one.

    Args:
        run: The run, with its data.
        tensors: The checkpoint, prepared for the plan of the run.
        output: The output of the run.
        directory: The directory that becomes the output; it may have finished blocks.
        identity: Identity of the run.
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
    """Return the sink of a rank.

    In a run with calibration data, every rank computes the same layers, and the first rank writes them.
    Without data, one rank reads, rounds and writes each block. If the exporter cannot share its files
    (`quark.checkpoint.Exporter.shares`), the first rank does so for all blocks.
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
    """Read the whole model, quantize it in memory, then write it on the first rank.

    ``complete`` is called on all ranks, before the checkpoint gets its name.
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
