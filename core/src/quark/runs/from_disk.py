"""From a checkpoint to a checkpoint, one block in memory at a time: the pipeline with another source and another sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from quark.calibration.finite import refuse_non_finite
from quark.checkpoint.atomic_directory import Leftover, finished_blocks, refuse_unfinished_run
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.destination import refuse_used_directory
from quark.checkpoint.export import exporter_of, exporting
from quark.checkpoint.exporter import Exporter, ExportOptions, ResumableExporter, ResumableStream, StreamingExporter
from quark.config.model import QConfig
from quark.errors import ConfigError, UnsupportedError
from quark.hf.dtype_and_device import torch_device, torch_dtype
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
from quark.runs.sink import CheckpointSink, InPlaceSink, JournaledSink
from quark.runs.skeleton import quantized_skeleton
from quark.runs.source import CheckpointSource

__all__ = ["Place", "leftover_choice", "opened_checkpoint", "quantize_checkpoint", "quantize_with_journal"]

Place = Callable[[], AbstractContextManager[Path]]
"""Opens the directory that becomes the output."""


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
    resume: bool = False,
    restart: bool = False,
) -> QuantPlan:
    """Quantize a checkpoint. The result is what loading, `ModelQuantizer.quantize_model` and an export give, byte for byte.

    Only what lies in no decoder block, and one block, are in memory. An exporter that cannot write block by block gets the whole model, and
    so does a transform that changes what lies outside the blocks, such as a rotation.

    A run that works block by block keeps a journal beside its output: when it is killed or fails, the blocks that are finished stay, and
    the same call with ``resume=True`` goes on with the next one. The result is that of a run that was not interrupted, byte for byte.

    Args:
        source: Directory of a float checkpoint in Hugging Face form.
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
        resume: Whether to go on from the finished blocks of an earlier run to ``out``; without any, the run starts from the beginning.
        restart: Whether to discard finished blocks of an earlier run to ``out``.

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
    options, leftover = options or ExportOptions(), leftover_choice(resume=resume, restart=restart)
    refuse_used_directory(Path(out), overwrite=options.overwrite)
    refuse_unfinished_run(Path(out), leftover)
    writer = exporter_of(exporter, options)
    shards, tensors = opened_checkpoint(Path(source), device, dtype, weight_converters)
    run = plan_run(tensors.model, config)
    if resume:
        _refuse_to_resume(run, exporter, writer)
    run = run.with_data(tensors.model, data, tensors.device)
    tensors.prepare(run.plan)
    place = partial(exporting, exporter, Path(out), overwrite=options.overwrite, leftover=leftover)
    if not run.works_by_block or not isinstance(writer, StreamingExporter):
        return _whole(run, tensors, place, (exporter, writer), options)
    if not isinstance(writer, ResumableExporter):
        return _streamed(run, tensors, place, writer, options)
    converters = weight_converters_of(tensors.model) if weight_converters is None else weight_converters
    identity = RunIdentity.of(tensors.model, run.plan, shards, run.data, exporter, options, converters, tensors.device)
    return quantize_with_journal(run, tensors, place, writer, options, identity)


def leftover_choice(*, resume: bool, restart: bool) -> Leftover:
    """Return what becomes of finished blocks of an earlier run; raises ConfigError where both are set."""
    if resume and restart:
        raise ConfigError("resume goes on from the finished blocks of an earlier run, and restart discards them: set one of the two")
    return "resume" if resume else "restart" if restart else "refuse"


def _refuse_to_resume(run: Run, name: str, writer: Exporter) -> None:
    """Refuse to resume a run that has no finished blocks on the disk before its end."""
    if not run.works_by_block:
        reason = "an algorithm of it changes the whole model, so that nothing is written before all of it is quantized"
    elif not isinstance(writer, ResumableExporter):
        reason = f"the exporter '{name}' cannot go on with an export that another process has begun (it has no method 'reopen')"
    else:
        return
    raise UnsupportedError(f"this run cannot be resumed: {reason}. Leave out resume=True (--resume); it starts from the beginning")


def opened_checkpoint(
    source: Path, device: str = "cpu", dtype: str = "auto", converters: Sequence[WeightConverter] | None = None
) -> tuple[Sequence[Shard], CheckpointSource]:
    """Return the files of a checkpoint, and its tensors with the model on the meta device; nothing has been read but headers.

    Arguments and errors as of `quantize_checkpoint`.
    """
    torch_dtype(dtype)
    shards = check_shards(source)
    target = torch_device(device)
    model = skeleton(source, dtype, target)
    converters = weight_converters_of(model) if converters is None else converters
    return shards, CheckpointSource(model, StoredTensors(model, shards, source, converters), target)


def _streamed(run: Run, tensors: CheckpointSource, place: Place, writer: StreamingExporter, options: ExportOptions) -> QuantPlan:
    """Write each block as soon as it is quantized."""
    model = tensors.model
    content = CheckpointContent(model, run.plan.config, run.plan)
    with place() as directory, writer.stream(content, quantized_skeleton(model, run.plan), directory, options) as stream:
        return run.quantize(model, CheckpointSink(model, stream), tensors).plan


def quantize_with_journal(
    run: Run, tensors: CheckpointSource, place: Place, writer: ResumableExporter, options: ExportOptions, identity: RunIdentity
) -> QuantPlan:
    """Write each block as soon as it is quantized, and enter it in a journal; go on from the journal of an earlier run.

    Args:
        run: With its data.
        tensors: The checkpoint, prepared for the plan of the run.
        place: Opens the directory that becomes the output; one with finished blocks is gone on with.
        writer: Writes the blocks.
        options: Of the export.
        identity: Of the run.

    Returns:
        The plan of what was done.
    """
    model = tensors.model
    with place() as directory:
        journal = Journal.read(directory.parent) if finished_blocks(directory.parent) else None
        if journal is not None:
            journal.refuse_other_run(identity)
            run = run.in_memory_mode(journal.two_passes)
            journal.remove_later_files(directory)
        content = CheckpointContent(model, run.plan.config, run.plan)
        open_stream = writer.stream if journal is None else writer.reopen
        with open_stream(content, quantized_skeleton(model, run.plan), directory, options) as stream:
            assert isinstance(stream, ResumableStream)  # `ResumableExporter.stream` promises that
            journal = journal or Journal.begin(directory, identity, two_passes=run.two_passes)
            sink = JournaledSink(model, stream, journal, decoder_blocks(model, run.plan.architecture))
            return run.quantize(model, sink, tensors).plan


def _whole(run: Run, tensors: CheckpointSource, place: Place, exporter: tuple[str, Exporter], options: ExportOptions) -> QuantPlan:
    """Read the whole model, quantize it in memory, then write it."""
    model = tensors.model
    tensors.load_all()
    refuse_non_finite(model, run.plan.quantized)
    content = run.quantize(model, InPlaceSink(model))
    name, writer = exporter
    with place() as directory, attributed(f"writing with the exporter '{name}'", origin("exporters", name)):
        writer.export(content, directory, options)
    return content.plan
