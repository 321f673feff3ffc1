"""Runs that quantize a checkpoint on disk to a new checkpoint, with one block in memory at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs
from torch import nn

from quark.base.ranks import ALONE, Ranks
from quark.base.torch_state import own_torch_state
from quark.checkpoint.atomic_directory import finished_blocks
from quark.checkpoint.exporter import BlockStream, ExportOptions
from quark.checkpoint.inspection import refuse_incomplete_export
from quark.checkpoint.run_file import complete_run_file
from quark.config.model import QConfig
from quark.models.hf.loading import torch_device, torch_dtype
from quark.models.hf.quantized_source import float_tensors_of
from quark.models.hf.shards import Shard, check_shards
from quark.models.hf.skeleton import skeleton
from quark.models.hf.stored_tensors import StoredTensors
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import weight_converters_of
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins.attribution import attributed, origin
from quark.plugins.run_events import RunEvents, running
from quark.runs.identity import RunIdentity, refuse_changed_source, refuse_different_ranks
from quark.runs.journal import Journal
from quark.runs.output import Output
from quark.runs.quantize_block import quantize_blocks, quantize_run
from quark.runs.run import Data, Run, plan_run
from quark.runs.selected_algorithms import settings_told
from quark.runs.sink import BlockSink, CheckpointSink, IdleSink, InPlaceSink, JournaledSink, ReadingSink, SharedSink
from quark.runs.source import CheckpointSource
from quark.runs.started_run import FinishedRun, StartedRun, finish_run, start_run

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter

Report = Callable[[FinishedRun, Path, str, Callable[[], CheckpointSource]], None]
"""A callable that writes files about a run into the complete checkpoint. The checkpoint may not have its
final name yet.

The arguments are the finished run, the directory of the checkpoint, the torch device of the run, and a
function that opens the float checkpoint once more. `quark_workbench.report.ReportOptions` is an example.
"""


Build = Callable[..., nn.Module]
"""A callable that returns the float model of a checkpoint, on the meta device.
`quark.models.hf.skeleton.skeleton` is the default.
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
    build: Build = skeleton,
) -> QuantPlan:
    """Quantize a checkpoint.

    The result has the same bytes as if you load the model, quantize it with `ModelQuantizer.quantize_model`
    and export it.

    Only the tensors outside the decoder blocks and one block at a time are in memory. Some exporters and
    transforms need the whole model in memory.

    If a run fails or is killed, its finished blocks and a journal stay on the disk. The same call with
    ``resume=True`` continues with the next block. If ``out`` is finished, the call does nothing.

    Args:
        source: Directory of a checkpoint in Hugging Face form. It is float, or quantized in a layout that an
            installed plugin can dequantize.
        out: Directory for the result. It must be empty or not exist, unless ``options.overwrite`` is set. The
            result is written to a temporary directory, which gets the name ``out`` when it is complete.
        config: The quantization configuration.
        data: Calibration data (see `quark.calibration.batches.calls`), or a function that returns them. The
            function is called only if something needs data.
        device: Torch device to work on.
        dtype: Dtype of the float model: float32, bfloat16 or float16. With ``auto``, it is the checkpoint's
            dtype.
        exporter: Name of an exporter.
        options: Options of the export, including options that only this exporter has.
        weight_converters: Conversions from stored tensors to the model's tensors
            (``transformers.core_model_loading`` and `quark.models.hf.weight_converters`). If it is None, the
            converters of the template are used.
        trust_remote_code: Whether code that comes with the checkpoint is allowed to run.
        resume: Whether to continue after the finished blocks of an earlier run with the same ``out``. If
            there are no such blocks, the run starts from the beginning.
        restart: Whether to discard the finished blocks of an earlier run with the same ``out``.
        report: A function that writes the report of the finished run beside the weights. If it is None, no
            report is written.
        ranks: The processes that share the run and its files
            (`quark_workbench.process_group.ranks_of_environment`).
        build: Creates the model without its weights. By default, the model has the class that config.json
            names.

    Returns: The plan as it was carried out. If ``out`` was already finished, it is the plan before the run.

    Raises:
        OutputError: ``out`` is in use, another process is writing to it, or it cannot be written.
        ResumeError: An earlier run with the same ``out`` has finished blocks, but neither ``resume`` nor
            ``restart`` is set. Or the finished blocks or ``out`` belong to a run with other settings. The
            message names the differences.
        CheckpointError: The checkpoint is damaged, incomplete, or does not fit its config.json.
        ConfigError, UnknownNameError, UnsupportedError, CalibrationError: A setting is wrong, unknown or
            unsupported, or calibration data are missing.
        RankError: Another rank has failed, or was started with other settings.
        NonFiniteError: A weight or an activation contains NaN or Inf.
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
        planned = CheckpointRun.of(config, data, opened, output, events, weight_converters)
        with closing(planned.tensors):
            if output.is_finished(planned.identity):
                plan = planned.run.plan
            elif not planned.works_by_block:
                plan = planned.work_on_whole(report)
            else:
                with output.opened() as directory:
                    with planned.streamed(directory) as (started, sink):
                        finished = finish_run(started, sink, quantize_blocks(started, sink))
                    planned.complete(finished, directory, report)
                plan = finished.content.plan
        events.exported(output.path, exporter)
    return plan


def opened_checkpoint(
    source: Path,
    device: str = "cpu",
    dtype: str = "auto",
    converters: Sequence[WeightConverter] | None = None,
    *,
    trust_remote_code: bool = False,
    build: Build = skeleton,
) -> tuple[Sequence[Shard], CheckpointSource]:
    """Open a checkpoint. Return its files and a `CheckpointSource`, whose model is on the meta device.

    Only the headers of the files are read.

    The arguments and errors are those of `quantize_checkpoint`.
    """
    torch_dtype(dtype)
    shards = check_shards(source)
    target = torch_device(device)
    model = build(source, dtype, target, trust_remote_code=trust_remote_code)
    converters = weight_converters_of(model) if converters is None else converters
    return shards, CheckpointSource(model, StoredTensors(model, shards, source, converters, float_tensors_of(source, shards)), target)


@attrs.frozen(eq=False)
class CheckpointRun:
    """A planned `Run` that reads from a checkpoint and writes to an output.

    Attributes:
        run: The run, with its data.
        opened: A function that opens the checkpoint once more, like `opened_checkpoint`.
        shards: The files of the checkpoint.
        tensors: The tensors of the checkpoint, assigned to the blocks of the plan.
        output: The output that the run writes to.
        identity: All facts that the result depends on.
    """

    run: Run
    opened: Callable[[], tuple[Sequence[Shard], CheckpointSource]]
    shards: Sequence[Shard]
    tensors: CheckpointSource
    output: Output
    identity: RunIdentity

    @classmethod
    def of(
        cls,
        config: QConfig,
        data: Data,
        opened: Callable[[], tuple[Sequence[Shard], CheckpointSource]],
        output: Output,
        events: RunEvents,
        converters: Sequence[WeightConverter] | None = None,
    ) -> Self:
        """Plan a run. Nothing is written.

        The errors are those of `quantize_checkpoint`.
        """
        ranks, (shards, tensors) = output.ranks, opened()
        run = plan_run(tensors.model, config, tensors.codes_of, tensors.carried)
        output.refuse_to_resume(run)
        output.refuse_unstorable(tensors.model, run.plan)
        run = run.with_data(tensors.model, data, tensors.device, ranks, events)
        tensors.prepare(run.plan)
        converters = weight_converters_of(tensors.model) if converters is None else converters
        of_output = output.exporter, output.options
        identity = RunIdentity.of(tensors.model, run.plan, shards, run.data, *of_output, converters, tensors.device, ranks.is_deterministic)
        refuse_different_ranks(ranks, identity, leftover=output.leftover)
        return cls(run, opened, shards, tensors, output, identity)

    @property
    def works_by_block(self) -> bool:
        """Whether each block is read, quantized and written before the next block is read."""
        return self.run.algorithms.works_by_block and self.output.writer.streams

    @contextmanager
    def streamed(self, directory: Path) -> Iterator[tuple[StartedRun, BlockSink]]:
        """Start the run or continue an interrupted run, and yield the started run and its sink.

        The sink writes each block as soon as it is quantized. If the run has a journal, the sink then adds
        the block to the journal.

        Args:
            directory: The directory that becomes the output. It may have finished blocks of an interrupted
                run.
        """
        run = self.run
        journal = Journal.read(directory.parent) if run.ranks.is_first and finished_blocks(directory.parent) else None
        if journal is not None:
            journal.refuse_other_run(self.identity)
            journal.remove_later_files(directory)
        two_passes = run.ranks.broadcast(None if journal is None else journal.two_passes)
        if two_passes is not None:
            run = run.in_memory_mode(two_passes)
        started = start_run(run, self.tensors.model, self.tensors)
        with self._opened_stream(started, directory, is_resumed=two_passes is not None) as stream:
            if run.ranks.is_first and journal is None and self.output.has_journal(run):
                journal = Journal.begin(directory, self.identity, two_passes=run.two_passes)
            yield started, self._sink(started, stream, journal)

    @contextmanager
    def _opened_stream(self, started: StartedRun, directory: Path, *, is_resumed: bool) -> Iterator[BlockStream | None]:
        """Yield the opened export. Yield None if this rank does not write files and does not read finished
        blocks.
        """
        ranks = started.run.ranks
        if not ranks.is_first:
            ranks.barrier()  # afterwards, the first rank has created the files
        if not (ranks.is_first or is_resumed or self.output.is_shared(started.run)):
            yield None
            return
        with started.stream(self.output.writer, directory, self.output.options) as stream:
            if ranks.is_first:
                ranks.barrier()
            yield stream

    def _sink(self, started: StartedRun, stream: BlockStream | None, journal: Journal | None) -> BlockSink:
        """Return the sink of this rank.

        In a run with calibration data, every rank computes all layers, and the first rank writes them. In a
        run without data, each block is read, rounded and written by one rank. If the exporter cannot write
        files from several processes (`quark.checkpoint.Exporter.shares`), the first rank reads, rounds and
        writes all blocks.
        """
        run, model, output = started.run, started.model, self.output
        blocks = decoder_blocks(model, started.plan.architecture)
        sink: CheckpointSink
        if stream is not None and output.is_shared(run):
            sink = SharedSink(model, stream, run.ranks, blocks)
        elif stream is None:
            return IdleSink(model) if output.is_divided(run) else InPlaceSink(model)
        elif not run.ranks.is_first:
            return ReadingSink(model, stream)
        elif journal is not None:
            sink = JournaledSink(model, stream, journal, blocks)
        else:
            sink = CheckpointSink(model, stream)
        if run.ranks.is_first:
            sink.begin()
        return sink

    def work_on_whole(self, report: Report | None) -> QuantPlan:
        """Read the whole model, quantize it in memory, and return the plan as it was carried out.

        The first rank writes the result.
        """
        run, output, model = self.run, self.output, self.tensors.model
        run.events.phase("load")
        self.tensors.load_all()
        finished = quantize_run(run, model, InPlaceSink(model))
        content = finished.content
        if not run.ranks.is_first:
            self.complete(finished, output.path, report)
            return content.plan
        run.events.phase("write")
        with output.built() as directory:
            with attributed(f"writing '{output.path}'", origin("exporters", output.exporter)):
                output.writer.export(content, directory, output.options)
            self.complete(finished, directory, report)
        return content.plan

    def complete(self, finished: FinishedRun, directory: Path, report: Report | None) -> None:
        """Check the written checkpoint, and add the files that describe the run.

        Afterwards, the directory is complete and can get its final name.

        Every rank must call this method. The first rank writes the files.
        """
        refuse_changed_source(self.run.ranks, self.identity, self.shards)
        if not self.run.ranks.is_first:
            return
        refuse_incomplete_export(self.output.exporter, directory, self.tensors.model)
        if report is not None:
            self.run.events.phase("report")
            report(finished, directory, str(self.tensors.device), lambda: self.opened()[1])
        complete_run_file(directory, attrs.asdict(self.identity))
