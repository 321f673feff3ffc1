"""From a checkpoint to a checkpoint, one block in memory at a time: the pipeline with another source and another sink."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Self

import attrs

from quark.calibration.finite import refuse_non_finite
from quark.checkpoint.atomic_directory import Leftover, finished_blocks, refuse_unfinished_run
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.destination import refuse_used_directory
from quark.checkpoint.export import exporter_of, exporting
from quark.checkpoint.exporter import Exporter, ExportOptions, ResumableExporter, ResumableStream, StreamingExporter
from quark.config.model import QConfig
from quark.errors import ConfigError, UnsupportedError
from quark.hf.dtype_and_device import torch_device, torch_dtype
from quark.hf.quantized_source import float_tensors_of
from quark.hf.shards import Shard, check_shards
from quark.hf.skeleton import skeleton
from quark.hf.stored_tensors import StoredTensors
from quark.hf.weight_converters import WeightConverter
from quark.planning.decoder_blocks import decoder_blocks
from quark.planning.family import weight_converters_of
from quark.planning.plan import QuantPlan
from quark.plugins.attribution import attributed, origin
from quark.runs.identity import RunIdentity
from quark.runs.journal import Journal
from quark.runs.run import Data, Run, plan_run
from quark.runs.run_report import ReportOptions, write_run_report
from quark.runs.sink import CheckpointSink, InPlaceSink, JournaledSink
from quark.runs.skeleton import quantized_skeleton
from quark.runs.source import CheckpointSource

__all__ = ["Output", "opened_checkpoint", "quantize_checkpoint", "quantize_with_journal"]

_Describe = Callable[[CheckpointContent, Path], None]


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
    report: ReportOptions | None = None,
) -> QuantPlan:
    """Quantize a checkpoint. The result is what loading, `ModelQuantizer.quantize_model` and an export give, byte for byte.

    Only what lies in no decoder block, and one block, are in memory. An exporter that cannot write block by block gets the whole model, and
    so does a transform that does not work by blocks (`quark.algorithms.Transform`).

    A run that works block by block keeps a journal beside its output: when it is killed or fails, the blocks that are finished stay, and
    the same call with ``resume=True`` goes on with the next one. The result is that of a run that was not interrupted, byte for byte.

    Args:
        source: Directory of a checkpoint in Hugging Face form: float, or quantized in a layout that an installed plugin dequantizes.
        out: Directory to write; it must not exist, be empty, or hold what ``options.overwrite`` lets be replaced. It appears when complete.
        config: What each layer gets.
        data: Calibration data (see `quark.calibration.batches.calls`), or a function that gives them: it is called with what
            needs them, and only if anything does.
        device: Torch device to work on.
        dtype: Of the float model: a key of float32, bfloat16, float16; ``auto`` takes what the checkpoint says.
        exporter: Name of an exporter.
        options: Of the export, those of the exporter's own among them.
        weight_converters: What stored tensors become before they are the model's, such as one fused matrix of queries, keys and values
            that the model has as three; None takes those of the model's template. A converter whose sources the model has a place for is
            not applied (`quark.hf.converted_tensors`).
        trust_remote_code: Whether code that comes with the checkpoint may run.
        resume: Whether to go on from the finished blocks of an earlier run to ``out``; without any, the run starts from the beginning.
        restart: Whether to discard finished blocks of an earlier run to ``out``.
        report: What the report measures that is written beside the weights; None writes none.

    Returns:
        What was done to each layer.

    Raises:
        OutputError: ``out`` is in use, another process is writing to it, or it cannot be written.
        ResumeError: (an OutputError) There are finished blocks of an earlier run, and neither ``resume`` nor ``restart`` is set; or that
            run is another one: other settings, source, data or versions, each of which is named.
        CheckpointError: The checkpoint is damaged, incomplete, or of another model than its config.json says.
        ConfigError, UnknownNameError, UnsupportedError: Something that is asked for is not there, or does not fit.
        CalibrationError: Data are wanted, and there are none.
        NonFiniteError: A weight or an activation holds NaN or Inf.
        PluginError: A plugin raised an error, or returned what cannot be built on; names plugin, version, algorithm and layer.

    Example:
        >>> from quark.torch import LLMTemplate
        >>> config = LLMTemplate.get("llama").get_config(scheme="int4_wo_128")
        >>> plan = quantize_checkpoint("Llama-3-8B", "Llama-3-8B-int4", config)  # doctest: +SKIP
    """
    output = Output.of(Path(out), exporter, options or ExportOptions(), resume=resume, restart=restart)
    shards, tensors = opened_checkpoint(Path(source), device, dtype, weight_converters, trust_remote_code=trust_remote_code)
    run = plan_run(tensors.model, config)
    output.refuse_to_resume(run)
    run = run.with_data(tensors.model, data, tensors.device)
    tensors.prepare(run.plan)
    opened = functools.partial(opened_checkpoint, Path(source), device, dtype, weight_converters, trust_remote_code=trust_remote_code)
    output = attrs.evolve(output, describe=_describer(report, run, lambda: opened()[1], device))
    with closing(tensors):
        if not run.works_by_block or not isinstance(output.writer, StreamingExporter):
            return _whole(run, tensors, output)
        if not isinstance(output.writer, ResumableExporter):
            return _streamed(run, tensors, output, output.writer)
        converters = weight_converters_of(tensors.model) if weight_converters is None else weight_converters
        identity = RunIdentity.of(tensors.model, run.plan, shards, run.data, exporter, output.options, converters, tensors.device)
        return quantize_with_journal(run, tensors, output, output.writer, identity)


@attrs.frozen(eq=False)
class Output:
    """Where a run writes to, and how.

    Attributes:
        path: The output directory.
        exporter: Name of the exporter.
        writer: The exporter.
        options: Of the export.
        leftover: What becomes of finished blocks of an earlier run.
        describe: Gets the complete checkpoint before it has its name.
    """

    path: Path
    exporter: str
    writer: Exporter
    options: ExportOptions
    leftover: Leftover = "refuse"
    describe: _Describe = lambda *_: None

    @classmethod
    def of(cls, path: Path, exporter: str, options: ExportOptions, *, resume: bool = False, restart: bool = False) -> Self:
        """Return the output, after checks that a run may write to it; arguments and errors as of `quantize_checkpoint`."""
        if resume and restart:
            raise ConfigError("resume goes on from the finished blocks of an earlier run, and restart discards them: set one of the two")
        leftover: Leftover = "resume" if resume else "restart" if restart else "refuse"
        refuse_used_directory(path, overwrite=options.overwrite)
        refuse_unfinished_run(path, leftover)
        return cls(path, exporter, exporter_of(exporter, options), options, leftover)

    def opened(self) -> AbstractContextManager[Path]:
        """Return the context of the directory to write to, which becomes the output."""
        return exporting(self.exporter, self.path, overwrite=self.options.overwrite, leftover=self.leftover)

    def refuse_to_resume(self, run: Run) -> None:
        """Raise UnsupportedError if finished blocks of an earlier run are to be used, and the run has none on the disk before its end."""
        if self.leftover != "resume" or (run.works_by_block and isinstance(self.writer, ResumableExporter)):
            return
        reason = f"the exporter '{self.exporter}' cannot go on with an export that another process has begun (it has no method 'reopen')"
        if not run.works_by_block:
            reason = "an algorithm of it changes the whole model, so that nothing is written before all of it is quantized"
        raise UnsupportedError(f"this run cannot be resumed: {reason}. Leave out resume=True (--resume); it starts from the beginning")


def opened_checkpoint(
    source: Path,
    device: str = "cpu",
    dtype: str = "auto",
    converters: Sequence[WeightConverter] | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[Sequence[Shard], CheckpointSource]:
    """Return the files of a checkpoint, and its tensors with the model on the meta device; nothing has been read but headers.

    Arguments and errors as of `quantize_checkpoint`.
    """
    torch_dtype(dtype)
    shards = check_shards(source)
    target = torch_device(device)
    model = skeleton(source, dtype, target, trust_remote_code=trust_remote_code)
    converters = weight_converters_of(model) if converters is None else converters
    return shards, CheckpointSource(model, StoredTensors(model, shards, source, converters, float_tensors_of(source, shards)), target)


def _describer(report: ReportOptions | None, run: Run, opened: Callable[[], CheckpointSource], device: str) -> _Describe:
    """Return what writes the report of a run into its checkpoint, or does nothing; ``opened`` opens the float checkpoint once more."""

    def describe(content: CheckpointContent, directory: Path) -> None:
        if report is not None:
            write_run_report(report, run, content, directory, opened, device)

    return describe


def _streamed(run: Run, tensors: CheckpointSource, output: Output, writer: StreamingExporter) -> QuantPlan:
    """Write each block as soon as it is quantized."""
    model = tensors.model
    started = run.start(model, tensors)
    content = CheckpointContent(model, started.plan.config, started.plan)
    skeleton = quantized_skeleton(model, started.plan)
    with output.opened() as directory:
        with writer.stream(content, skeleton, directory, output.options) as stream:
            content = started.quantize(CheckpointSink(model, stream))
        output.describe(content, directory)
    return content.plan


def quantize_with_journal(
    run: Run, tensors: CheckpointSource, output: Output, writer: ResumableExporter, identity: RunIdentity
) -> QuantPlan:
    """Write each block as soon as it is quantized, and enter it in a journal; go on from the journal of an earlier run.

    Args:
        run: With its data.
        tensors: The checkpoint, prepared for the plan of the run.
        output: Where to write to; a directory with finished blocks is gone on with.
        writer: The exporter of the output.
        identity: Of the run.

    Returns:
        The plan of what was done.
    """
    model = tensors.model
    with output.opened() as directory:
        journal = Journal.read(directory.parent) if finished_blocks(directory.parent) else None
        if journal is not None:
            journal.refuse_other_run(identity)
            run = run.in_memory_mode(journal.two_passes)
            journal.remove_later_files(directory)
        started = run.start(model, tensors)
        content = CheckpointContent(model, started.plan.config, started.plan)
        open_stream = writer.stream if journal is None else writer.reopen
        with open_stream(content, quantized_skeleton(model, started.plan), directory, output.options) as stream:
            if not isinstance(stream, ResumableStream):
                raise origin("exporters", output.exporter).error("has a method 'reopen', and its method 'stream' gives no ResumableStream")
            journal = journal or Journal.begin(directory, identity, two_passes=run.two_passes)
            sink = JournaledSink(model, stream, journal, decoder_blocks(model, started.plan.architecture))
            content = started.quantize(sink)
        output.describe(content, directory)
    return content.plan


def _whole(run: Run, tensors: CheckpointSource, output: Output) -> QuantPlan:
    """Read the whole model, quantize it in memory, then write it."""
    model = tensors.model
    tensors.load_all()
    refuse_non_finite(model, run.plan.quantized)
    content = run.quantize(model, InPlaceSink(model))
    with output.opened() as directory:
        with attributed(f"writing '{output.path}'", origin("exporters", output.exporter)):
            output.writer.export(content, directory, output.options)
        output.describe(content, directory)
    return content.plan
