"""From a checkpoint to a checkpoint, one block in memory at a time: the pipeline with another source and another sink."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quark.calibration.finite import refuse_non_finite
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.destination import refuse_used_directory
from quark.checkpoint.export import exporter_of, exporting
from quark.checkpoint.exporter import Exporter, ExportOptions, StreamingExporter
from quark.config.model import QConfig
from quark.hf.dtype_and_device import torch_device, torch_dtype
from quark.hf.loading import load_model
from quark.hf.shards import check_shards
from quark.hf.skeleton import skeleton
from quark.hf.stored_tensors import StoredTensors
from quark.planning.plan import QuantPlan
from quark.plugins.attribution import attributed, origin
from quark.runs.run import algorithms_of, prepared
from quark.runs.sink import CheckpointSink, InPlaceSink
from quark.runs.skeleton import quantized_skeleton
from quark.runs.source import CheckpointSource


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    config: QConfig,
    data: Iterable[Any] | None = None,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    exporter: str = "safetensors",
    options: ExportOptions | None = None,
) -> QuantPlan:
    """Quantize a checkpoint. The result is what loading, `ModelQuantizer.quantize_model` and an export give, byte for byte.

    Only what lies in no decoder block, and one block, are in memory. An exporter that cannot write block by block gets the whole model, and
    so does a transform that changes what lies outside the blocks, such as a rotation.

    Args:
        source: Directory of a float checkpoint in Hugging Face form.
        out: Directory to write; it must not exist, be empty, or hold what ``options.overwrite`` lets be replaced. It appears when complete.
        config: What each layer gets.
        data: Calibration data (see `quark.calibration.batches.calls`), read where something wants them.
        device: Torch device to work on.
        dtype: Of the float model: a key of float32, bfloat16, float16; ``auto`` takes what the checkpoint says.
        exporter: Name of an exporter.
        options: Of the export, those of the exporter's own among them.

    Returns:
        What was done to each layer.

    Raises:
        OutputError: ``out`` is in use, or cannot be written.
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
    options = options or ExportOptions()
    refuse_used_directory(Path(out), overwrite=options.overwrite)
    writer = exporter_of(exporter, options)
    if isinstance(writer, StreamingExporter) and all(t.works_by_block for t in algorithms_of(config).transforms):
        return _streamed(Path(source), Path(out), config, data, device, dtype, (exporter, writer), options)
    return _whole(Path(source), Path(out), config, data, device, dtype, (exporter, writer), options)


def _streamed(
    source: Path,
    out: Path,
    config: QConfig,
    data: Iterable[Any] | None,
    device: str,
    dtype: str,
    exporter: tuple[str, StreamingExporter],
    options: ExportOptions,
) -> QuantPlan:
    torch_dtype(dtype)
    shards = check_shards(source)
    target = torch_device(device)
    model = skeleton(source, dtype, target)
    tensors = CheckpointSource(model, StoredTensors(model, shards, source), target)
    job = prepared(model, config, data, target)
    tensors.prepare(job.plan)
    content = CheckpointContent(model, job.plan.config, job.plan)
    name, writer = exporter
    place = exporting(name, out, overwrite=options.overwrite)
    with place as directory, writer.stream(content, quantized_skeleton(model, job.plan), directory, options) as stream:
        sink = CheckpointSink(model, stream)
        job.run(model, sink, tensors)
    return sink.content.plan


def _whole(
    source: Path,
    out: Path,
    config: QConfig,
    data: Iterable[Any] | None,
    device: str,
    dtype: str,
    exporter: tuple[str, Exporter],
    options: ExportOptions,
) -> QuantPlan:
    model = load_model(source, dtype, device)
    job = prepared(model, config, data, torch_device(device))
    refuse_non_finite(model, job.plan.quantized)
    sink = InPlaceSink(model)
    job.run(model, sink)
    name, writer = exporter
    place = exporting(name, out, overwrite=options.overwrite)
    with place as directory, attributed(f"writing '{out}'", origin("exporters", name)):
        writer.export(sink.content, directory, options)
    return sink.content.plan
