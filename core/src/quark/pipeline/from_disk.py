"""From a checkpoint to a checkpoint, one block in memory at a time: the pipeline with another source and another sink."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quark.export.api import exporter_of
from quark.export.place import refuse_used_directory
from quark.export.protocol import Exporter, ExportOptions, StreamingExporter
from quark.model.loading import load_model, skeleton, torch_device, torch_dtype
from quark.model.plan import QuantPlan
from quark.model.shards import check_shards
from quark.model.stored_tensors import StoredTensors
from quark.pipeline.finite import refuse_non_finite
from quark.pipeline.foreseen import foreseen
from quark.pipeline.job import algorithms_of, prepared
from quark.pipeline.sink import CheckpointSink, InPlaceSink
from quark.pipeline.source import CheckpointSource
from quark.specs.model import QConfig


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
        out: Directory to write; must not exist or be empty. It appears when it is complete.
        config: What each layer gets.
        data: Calibration data (see `quark.pipeline.batches.calls`), read where something wants them.
        device: Torch device to work on.
        dtype: Of the float model: a key of float32, bfloat16, float16; ``auto`` takes what the checkpoint says.
        exporter: Name of an exporter.
        options: Of the export.

    Returns:
        What was done to each layer.

    Raises:
        OutputError: ``out`` is in use, or cannot be written.
        CheckpointError: The checkpoint is damaged, incomplete, or of another model than its config.json says.
        ConfigError, UnknownNameError, UnsupportedError: Something that is asked for is not there, or does not fit.
        CalibrationError: Data are wanted, and there are none.
        NonFiniteError: A weight or an activation holds NaN or Inf.

    Example:
        >>> from quark.torch import LLMTemplate
        >>> config = LLMTemplate.get("llama").get_config(scheme="int4_wo_128")
        >>> plan = quantize_checkpoint("Llama-3-8B", "Llama-3-8B-int4", config)  # doctest: +SKIP
    """
    refuse_used_directory(Path(out))
    writer = exporter_of(exporter)
    if isinstance(writer, StreamingExporter) and all(t.works_by_block for t in algorithms_of(config).transforms):
        return _streamed(Path(source), Path(out), config, data, device, dtype, writer, options or ExportOptions())
    return _whole(Path(source), Path(out), config, data, device, dtype, writer, options or ExportOptions())


def _streamed(
    source: Path,
    out: Path,
    config: QConfig,
    data: Iterable[Any] | None,
    device: str,
    dtype: str,
    exporter: StreamingExporter,
    options: ExportOptions,
) -> QuantPlan:
    torch_dtype(dtype)
    shards = check_shards(source)
    target = torch_device(device)
    model = skeleton(source, dtype, target)
    tensors = CheckpointSource(model, StoredTensors(model, shards, source), target)
    job = prepared(model, config, data, target)
    tensors.prepare(job.plan)
    model.quark_plan = job.plan  # type: ignore[assignment]
    with exporter.stream(model, foreseen(model, job.plan), out, options) as stream:
        job.run(model, CheckpointSink(model, stream), tensors)
    done: QuantPlan = model.quark_plan  # type: ignore[assignment]
    return done


def _whole(
    source: Path,
    out: Path,
    config: QConfig,
    data: Iterable[Any] | None,
    device: str,
    dtype: str,
    exporter: Exporter,
    options: ExportOptions,
) -> QuantPlan:
    model = load_model(source, dtype, device)
    job = prepared(model, config, data, torch_device(device))
    refuse_non_finite(model, job.plan.quantized)
    job.run(model, InPlaceSink(model))
    exporter.export(model, out, options)
    done: QuantPlan = model.quark_plan  # type: ignore[assignment]
    return done
