"""From a checkpoint to a checkpoint, one block in memory at a time: the pipeline with another source and another sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from quark.calibration.finite import refuse_non_finite
from quark.checkpoint.destination import refuse_used_directory
from quark.checkpoint.export import exporter_of, exporting
from quark.checkpoint.exporter import Exporter, ExportOptions, StreamingExporter
from quark.config.model import QConfig
from quark.hf.dtype_and_device import torch_device, torch_dtype
from quark.hf.shards import check_shards
from quark.hf.skeleton import skeleton
from quark.hf.stored_tensors import StoredTensors
from quark.hf.weight_converters import WeightConverter
from quark.planning.family import weight_converters_of
from quark.planning.plan import QuantPlan
from quark.plugins.attribution import attributed, origin
from quark.ranks import ALONE, Ranks
from quark.runs.run import Data, Run, plan_run
from quark.runs.shared_output import opened_sink
from quark.runs.sink import InPlaceSink
from quark.runs.source import CheckpointSource

__all__ = ["quantize_checkpoint"]

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
    ranks: Ranks = ALONE,
) -> QuantPlan:
    """Quantize a checkpoint. The result is what loading, `ModelQuantizer.quantize_model` and an export give, byte for byte.

    Only what lies in no decoder block, and one block, are in memory. An exporter that cannot write block by block gets the whole model, and
    so does a transform that changes what lies outside the blocks, such as a rotation.

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
        ranks: The processes that share the run and its files (`quark.process_group.ranks_of_environment`).

    Returns:
        What was done to each layer.

    Raises:
        OutputError: ``out`` is in use, or cannot be written.
        CheckpointError: The checkpoint is damaged, incomplete, or of another model than its config.json says.
        ConfigError, UnknownNameError, UnsupportedError: Something that is asked for is not there, or does not fit.
        CalibrationError: Data are wanted, and there are none. RankError: Another rank has failed.
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
    tensors = _opened(Path(source), device, dtype, weight_converters)
    run = plan_run(tensors.model, config).with_data(tensors.model, data, tensors.device, ranks)
    tensors.prepare(run.plan)
    place = partial(exporting, exporter, Path(out), overwrite=options.overwrite)
    if isinstance(writer, StreamingExporter) and run.works_by_block:
        with opened_sink(run, tensors.model, place, writer, options) as sink:
            return run.quantize(tensors.model, sink, tensors).plan
    return _whole(run, tensors, place, (exporter, writer), options)


def _opened(source: Path, device: str, dtype: str, converters: Sequence[WeightConverter] | None) -> CheckpointSource:
    """Return the checkpoint with its model on the meta device; nothing has been read but headers."""
    torch_dtype(dtype)
    shards = check_shards(source)
    target = torch_device(device)
    model = skeleton(source, dtype, target)
    converters = weight_converters_of(model) if converters is None else converters
    return CheckpointSource(model, StoredTensors(model, shards, source, converters), target)


def _whole(run: Run, tensors: CheckpointSource, place: Place, exporter: tuple[str, Exporter], options: ExportOptions) -> QuantPlan:
    """Read the whole model, quantize it in memory, then write it; of several ranks, the first does."""
    model = tensors.model
    tensors.load_all()
    refuse_non_finite(model, run.plan.quantized)
    content = run.quantize(model, InPlaceSink(model))
    if not run.ranks.is_first:
        return content.plan
    name, writer = exporter
    with place() as directory, attributed("writing the checkpoint", origin("exporters", name)):
        writer.export(content, directory, options)
    return content.plan
