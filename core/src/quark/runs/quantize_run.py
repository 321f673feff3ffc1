"""Start and finish a run, before and after `quark.runs.quantize_block.quantize_blocks`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from quark.calibration.plugin_checks import StartedTransform
from quark.calibration.report import CalibrationReport
from quark.calibration.spilled_inputs import SpilledInputs
from quark.calibration.transform_validation import validate_transforms
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.save_pretrained import set_results
from quark.config.model import QConfig
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins.attribution import attributed
from quark.runs.quantize_block import quantize_blocks
from quark.runs.run import Run, allowed_activations
from quark.runs.selected_algorithms import Algorithms
from quark.runs.sink import BlockSink
from quark.runs.source import InMemorySource, RunSource
from quark.runs.started_run import FinishedRun, StartedRun


def quantize_run(run: Run, model: nn.Module, sink: BlockSink, source: RunSource | None = None) -> FinishedRun:
    """Quantize ``model``, and return the `FinishedRun`."""
    started = start_run(run, model, source)
    return finish_run(started, sink, quantize_blocks(started, sink))


@attributed("transforming the model")
def start_run(run: Run, model: nn.Module, source: RunSource | None = None) -> StartedRun:
    """Start a run: validate transforms, and apply the accepted ones outside the decoder blocks.

    Args:
        run: The run, with its data.
        model: The model of the plan.
        source: Source of the tensors of ``model``. None if the model is in memory.
    """
    source = source or InMemorySource()
    spilled = _spilled(run.plan.config)
    run.events.phase("load")
    source.load(None)
    transforms, compensated = run.algorithms.transforms, run.algorithms.compensates
    if any(t.is_validated for t in transforms.values()):
        run.events.phase("validate")
    validations = validate_transforms(model, run.plan, transforms, run.data, source, run.ranks, compensated=compensated)
    run = run.as_validated(model, validations)
    started = start_transforms(model, run.plan, run.algorithms)
    return StartedRun(run, model, source, started, validations, spilled)


def start_transforms(model: nn.Module, plan: QuantPlan, algorithms: Algorithms) -> list[StartedTransform]:
    """Start transforms: each changes the tensors outside the decoder blocks, all of which are in memory.

    Afterwards, the model has the same tensors outside the blocks as the finished model. Exports need this for
    their layout.
    """
    started = algorithms.started_transforms(model, plan)
    for transform in started:
        transform.apply_global(model, decoder_blocks(model, plan.architecture))
    return started


@attributed("quantizing the model")
def finish_run(started: StartedRun, sink: BlockSink, report: CalibrationReport) -> FinishedRun:
    """Finish the sink of a run whose blocks are quantized, and return the `FinishedRun`.

    Its plan leaves out transforms that have changed nothing. The model gets the results as attributes:
    ``quant_config``, ``quark_plan``, ``quark_report`` and ``quark_quantized``.
    """
    run, model = started.run, started.model
    transforms = enumerate(zip(run.algorithms.transforms, started.transforms, strict=True))
    plan = run.without_idle([name for i, (name, t) in transforms if i not in report.applied and not t.has_changed_outside])
    report.validated = {name: metrics for name, validation in started.validations.items() if (metrics := validation.metrics())}
    content = CheckpointContent(model, plan.config, plan)
    sink.finish(content)
    set_results(content)
    model.quark_report = report  # type: ignore[assignment]
    report.log()
    return FinishedRun(run, content, report)


def _spilled(config: QConfig) -> SpilledInputs | None:
    """Return the store of block inputs that exceed the allowed memory, or None."""
    if config.spill_directory is None:
        return None
    allowed = allowed_activations(config, torch.device("cpu"))
    return None if allowed is None else SpilledInputs(Path(config.spill_directory), allowed)
