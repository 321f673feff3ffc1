"""StartedRun and FinishedRun: a run while it quantizes blocks, and after the last block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from quark.algorithms import Tuning
from quark.calibration.block_branches import BlockBranches
from quark.calibration.input_groups import InputGroups
from quark.calibration.phases import PhaseClock
from quark.calibration.plugin_checks import CheckedRounding, StartedTransform
from quark.calibration.report import CalibrationReport
from quark.calibration.spilled_inputs import SpilledInputs
from quark.calibration.transform_validation import TransformValidation
from quark.checkpoint.content import CheckpointContent
from quark.models.plan.quant_plan import QuantPlan
from quark.runs.memory import FreedMemory, tokens_in
from quark.runs.run import Run
from quark.runs.run_figures import RunFigures
from quark.runs.source import InMemorySource, RunSource


@attrs.frozen(eq=False)
class StartedRun:
    """A run whose transforms have changed tensors outside the decoder blocks.

    Attributes:
        run: The run, without the transforms that validation refused.
        model: The model. Outside the blocks, it has the modules and tensors of the finished model.
        source: Loads the tensors of the blocks.
        transforms: The started transforms, in order.
        validations: Validations of the transforms, by name.
        spilled: Storage for the tensors of forwards that wait at a block; None leaves them in memory.
        rounding: Chooses codes.
        tunings: Tunings by name, in the order in which they are applied.
        input_groups: Learns from block to block which layers share an input.
        freed: Returns freed memory to the system.
        figures: Collects metrics of layers and blocks in the report, and has the run's clock.
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
        return RunFigures(CalibrationReport(), tokens_in(run.data), run.algorithms.streams, PhaseClock(changed=run.events.phase))

    @property
    def branches(self) -> BlockBranches:
        """The branches of the model's layers."""
        return BlockBranches(self.run.algorithms.branching, self.model.get_submodule)

    @property
    def plan(self) -> QuantPlan:
        """The plan of the run."""
        return self.run.plan

    @property
    def report(self) -> CalibrationReport:
        """The report of the blocks so far."""
        return self.figures.report

    def learned(self) -> dict[str, Any]:
        """Return the state that later blocks need, as JSON values."""
        return {"input_groups": self.input_groups.learned(), "transforms": [t.learned() for t in self.transforms]}

    def recall(self, learned: Mapping[str, Any]) -> None:
        """Restore the state of an interrupted run."""
        self.input_groups.recall(learned["input_groups"])
        for transform, own in zip(self.transforms, learned["transforms"], strict=True):
            transform.recall(own)


@attrs.frozen(eq=False)
class FinishedRun:
    """A run that has quantized its model.

    Attributes:
        run: The run, with its data.
        content: The quantized model, and its plan as it was carried out.
        report: The metrics of the run.
    """

    run: Run
    content: CheckpointContent
    report: CalibrationReport
