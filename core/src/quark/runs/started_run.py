"""StartedRun and FinishedRun. They represent a run that has been started and a run that has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from quark.algorithms import Tuning
from quark.base.log import get_logger
from quark.base.names import folded
from quark.calibration.block_branches import BlockBranches
from quark.calibration.input_groups import InputGroups
from quark.calibration.phases import PhaseClock
from quark.calibration.plugin_checks import CheckedRounding, StartedTransform
from quark.calibration.report import CalibrationReport
from quark.calibration.spilled_inputs import SpilledInputs
from quark.calibration.transform_validation import TransformValidation, validate_transforms
from quark.checkpoint import BlockStream, CheckpointContent, Exporter, ExportOptions
from quark.checkpoint.save_pretrained import set_results
from quark.config.model import QConfig
from quark.models.layers import have_same_weight
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins.attribution import attributed
from quark.runs.memory import FreedMemory, tokens_in
from quark.runs.run import Run, allowed_activations
from quark.runs.run_figures import RunFigures
from quark.runs.selected_algorithms import Algorithms
from quark.runs.sink import BlockSink
from quark.runs.skeleton import quantized_skeleton
from quark.runs.source import InMemorySource, RunSource


@attrs.frozen(eq=False)
class StartedRun:
    """A run that has been started: its transforms have changed the tensors outside the decoder blocks.

    Attributes:
        run: The run, without the transforms that were rejected by their validation.
        model: The model. The modules and tensors outside its blocks are those of the finished model.
        source: Loads the tensors of the blocks.
        transforms: The started transforms, in the order in which they are applied.
        validations: The validations of transforms, by name.
        spilled: Storage for the tensors of forward passes that wait at a block. If it is None, the tensors
            stay in memory.
        rounding: The rounding, which chooses the codes of weights.
        tunings: Tunings by name, in the order in which they are applied.
        input_groups: The groups of layers that share an input. Groups observed in one block are expected in
            the next.
        freed: Returns freed memory to the system.
        figures: Collects the metrics of layers and blocks, and has the clock of the run.
    """

    run: Run
    model: nn.Module
    source: RunSource = attrs.field(factory=InMemorySource)
    transforms: Sequence[StartedTransform] = ()
    validations: Mapping[str, TransformValidation] = attrs.field(factory=dict)
    spilled: SpilledInputs | None = None
    rounding: CheckedRounding = attrs.field(init=False)
    tunings: Mapping[str, Tuning] = attrs.field(init=False)
    input_groups: InputGroups = attrs.field(init=False)
    freed: FreedMemory = attrs.field(init=False, factory=FreedMemory)
    figures: RunFigures = attrs.field(init=False)

    @rounding.default
    def _rounding(self) -> CheckedRounding:
        return self.run.algorithms.checked_rounding()

    @tunings.default
    def _tunings(self) -> Mapping[str, Tuning]:
        return self.run.algorithms.checked_tunings()

    @input_groups.default
    def _input_groups(self) -> InputGroups:
        return InputGroups(self.plan.architecture, self.plan.config.shared_scale_groups)

    @figures.default
    def _figures(self) -> RunFigures:
        run = self.run
        clock = PhaseClock(changed=run.events.phase)
        return RunFigures(CalibrationReport(), run.events, tokens_in(run.data), run.algorithms.streams, clock)

    @property
    def branches(self) -> BlockBranches:
        """An object that makes the branches of the model's layers."""
        return BlockBranches(self.run.algorithms.branching, self.model.get_submodule)

    @property
    def plan(self) -> QuantPlan:
        """The plan of the run."""
        return self.run.plan

    @property
    def report(self) -> CalibrationReport:
        """The calibration report, with the metrics of the blocks that are finished so far."""
        return self.figures.report

    def stream(self, exporter: Exporter, directory: Path, options: ExportOptions) -> AbstractContextManager[BlockStream]:
        """Return a context manager that opens an export. The export writes the model to ``directory``."""
        content = CheckpointContent(self.model, self.plan.config, self.plan)
        return exporter.stream(content, quantized_skeleton(self.model, self.plan), directory, options)

    def learned(self) -> dict[str, Any]:
        """Return the state of the run that later blocks need, as JSON values."""
        return {"input_groups": self.input_groups.learned(), "transforms": [t.learned() for t in self.transforms]}

    def recall(self, learned: Mapping[str, Any]) -> None:
        """Restore the state that `learned` returned in an interrupted run."""
        self.input_groups.recall(learned["input_groups"])
        for transform, own in zip(self.transforms, learned["transforms"], strict=True):
            transform.recall(own)


@attrs.frozen(eq=False)
class FinishedRun:
    """A run that has quantized its model.

    Attributes:
        run: The run, with its data.
        content: The quantized model, with the plan as it was carried out.
        report: The metrics of the run.
    """

    run: Run
    content: CheckpointContent
    report: CalibrationReport


@attributed("transforming the model")
def start_run(run: Run, model: nn.Module, source: RunSource | None = None) -> StartedRun:
    """Start a run: validate the transforms, and apply the accepted transforms outside the decoder blocks.

    Args:
        run: The run, with its data.
        model: The model of the plan. It is changed in place.
        source: Loads the tensors of ``model``. None if the model is in memory.
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
    layers = model.get_submodule
    shared = run.plan.sharing({row.name for row in run.plan.rows})
    if apart := [name for name, source in shared.items() if not have_same_weight(layers(name), layers(source))]:
        get_logger(__name__).info(f"A transform has untied the weight of {folded(apart)}, so that the weight gets codes of its own.")
        run = attrs.evolve(run, plan=run.plan.with_own_codes(apart))
    return StartedRun(run, model, source, started, validations, spilled)


def start_transforms(model: nn.Module, plan: QuantPlan, algorithms: Algorithms) -> list[StartedTransform]:
    """Start transforms. Each transform changes the tensors outside the decoder blocks.

    These tensors must be in memory.

    Afterwards, the tensors outside the blocks have the names, shapes and dtypes of the finished model.
    Exports compute their layout from these names, shapes and dtypes.
    """
    started = algorithms.started_transforms(model, plan)
    for transform in started:
        transform.apply_global(model, decoder_blocks(model, plan.architecture))
    return started


@attributed("quantizing the model")
def finish_run(started: StartedRun, sink: BlockSink, report: CalibrationReport) -> FinishedRun:
    """Finish a run whose blocks are quantized: finish the sink, and return the `FinishedRun`.

    Transforms that have changed nothing are left out of the plan. The model gets the results as attributes:
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
    """Return the storage for inputs of blocks that do not fit into memory.

    Return None if the run keeps all inputs in memory.
    """
    if config.spill_directory is None:
        return None
    allowed = allowed_activations(config, torch.device("cpu"))
    return None if allowed is None else SpilledInputs(Path(config.spill_directory), allowed)
