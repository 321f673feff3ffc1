"""Runs with roundings, transforms and tunings that no plugin registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch import nn

from quark.algorithms import Rounding, RoundToNearest, Transform, Tuning
from quark.calibration.batches import Call
from quark.calibration.plugin_checks import CheckedRounding, StartedTransform
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.quant_plan import QuantPlan
from quark.runs.run import Run, with_algorithm
from quark.runs.selected_algorithms import Algorithms
from quark.runs.started_run import StartedRun, start_transforms

__all__ = ["hand_made_run"]


class HandMade(Algorithms):
    """Algorithms whose results are not checked, since errors would name their plugin, and there is none."""

    def checked_rounding(self) -> CheckedRounding:
        return CheckedRounding(self.rounding)

    def started_transforms(self, model: nn.Module, plan: QuantPlan) -> list[StartedTransform]:
        return [StartedTransform.of(transform, model, plan) for transform in self.transforms.values()]

    def checked_tunings(self) -> dict[str, Tuning]:
        return dict(self.tunings)


def hand_made_run(
    model: nn.Module,
    plan: QuantPlan,
    data: Sequence[Call] = (),
    rounding: Rounding | None = None,
    *transforms: Transform,
    tunings: Mapping[str, Tuning] | None = None,
    two_passes: bool = False,
) -> StartedRun:
    """Return a run of this plan and these algorithms, whose global transforms have been applied."""
    named = {f"transform {i}": transform for i, transform in enumerate(transforms)}
    algorithms = HandMade(named, rounding or RoundToNearest(), None if rounding is None else "by hand", tunings or {})
    rows = with_algorithm(plan, algorithms, {block.name for block in decoder_blocks(model, plan.architecture)})
    run = Run(attrs.evolve(plan, rows=rows), algorithms, data, two_passes)
    return StartedRun(run, model, transforms=start_transforms(model, plan, algorithms))
