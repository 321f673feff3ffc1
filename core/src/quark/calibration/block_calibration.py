"""BlockCalibration: the base class of two classes that calibrate and round a block in different ways.

One way pauses the forward passes inside the block (`quark.calibration.block_rounding`). The other runs them
through the block twice (`quark.calibration.two_passes`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs
from torch import nn

from quark.algorithms import RoundingTask, Statistic
from quark.base.ranks import Ranks
from quark.calibration.activation_scales import ActivationScales
from quark.calibration.block_branches import BlockBranches
from quark.calibration.block_tuning import BlockTuning
from quark.calibration.input_groups import InputGroups
from quark.calibration.input_statistics import Collector
from quark.calibration.lockstep import BlockRun
from quark.calibration.phases import PhaseClock
from quark.calibration.plugin_checks import CheckedRounding
from quark.calibration.report import CalibrationReport
from quark.calibration.round_to_nearest import round_to_nearest, rounding_tasks
from quark.calibration.rounding_validation import round_validated
from quark.models.layers import QuantizedLayer
from quark.models.layers.experts import SeparateExperts
from quark.models.plan.decoder_blocks import Block

Layers = Mapping[str, tuple[nn.Module, QuantizedLayer]]


@attrs.define(eq=False, slots=False)
class BlockCalibration(ABC):
    """Rounds the weights of one block and sets the scales of its activations.

    The data comes from calibration forward passes.

    Args:
        block_run: The forward passes, which wait at the block's entry.
        block: The block.
        layers: A mapping from the full name of each quantized layer to the float layer and the quantized
            layer.
        chosen: Full names of the layers whose codes ``checked`` chooses. All other layers are rounded to
            nearest.
        checked: The rounding algorithm, which chooses codes.
        input_groups: Groups of layers that share an input. The same object is used for all blocks, because
            groups observed in one block are expected in the next.
        scales: Scales of the block's activations.
        branches: Branches of the block's layers.
        clock: Measures the time of statistics and of the rounding.
        tuning: Tunes the rounded block before the forward passes leave it, or None if there is no tuning.

    Attributes:
        rounded: Full names of the layers whose weight has been rounded.
        metrics: Metrics of each layer for which statistics were collected, by full name. They are the metrics
            of the rounding and its validation, and the number of tokens that reached the layer.
        inputs: Samples of the rounded layers' inputs, by full name of the layer. Plugins choose the samples
            (`quark.plugins.measuring.InputSeen`).
        flops: Lower bound of the number of floating-point operations of the statistics. Each token costs one
            multiplication and one addition for each entry of each second moment.
    """

    _block_run: BlockRun
    _block: Block
    _layers: Layers
    _chosen: Collection[str]
    _checked: CheckedRounding
    _input_groups: InputGroups
    _scales: ActivationScales
    _branches: BlockBranches
    _clock: PhaseClock = attrs.field(factory=PhaseClock)
    _tuning: BlockTuning | None = None
    _routed: tuple[str, ...] = attrs.field(init=False)
    rounded: set[str] = attrs.field(init=False, factory=set)
    metrics: dict[str, dict[str, Any]] = attrs.field(init=False, factory=dict)
    inputs: dict[str, Mapping[str, Any]] = attrs.field(init=False, factory=dict)
    flops: int = attrs.field(init=False, default=0)
    _counted: Collector | None = attrs.field(init=False, default=None)

    @_routed.default
    def _prefixes_of_experts(self) -> tuple[str, ...]:
        """Return the prefixes with which the full names of the experts' layers begin."""
        names = (n for n, m in self._block.module.named_modules() if isinstance(m, SeparateExperts))
        return tuple(f"{self._block.name}.{n}.".lstrip(".") for n in names)

    @property
    def _ranks(self) -> Ranks:
        """The ranks of the run. All ranks round the block together, and each runs its own forward passes."""
        return self._block_run.grid.ranks

    @property
    def _needs(self) -> tuple[type[Statistic], ...]:
        """The classes of the statistics that the rounding and the branches need. They are statistics of
        inputs.
        """
        return tuple(dict.fromkeys((*self._checked.rounding.needs, *self._branches.needs)))

    def _is_observed(self, name: str) -> bool:
        """Return whether the rounding of a layer needs statistics of the layer's input.

        Such a layer is rounded when its statistics are complete.
        """
        return name in self._chosen or (bool(self._branches.needs) and self._layers[name][1].branch is not None)

    def _round_observed(self, layers: Mapping[str, QuantizedLayer], collector: Collector) -> None:
        """Round the layers of an input group, and make their branches.

        The statistics in ``collector`` must be complete.
        """
        chosen = {name: layer for name, layer in layers.items() if name in self._chosen}
        tasks = self._tasks(chosen, collector)
        with self._clock.phase("solve"), self._branches.made(layers, collector.statistics):
            metrics = round_validated(self._checked, tasks)
            round_to_nearest({name: layer for name, layer in layers.items() if name not in chosen}, self._input_groups.siblings)
        self._keep(metrics, layers, collector)

    @abstractmethod
    def work(self) -> None:
        """Run every forward pass through the block, and round the block's weights meanwhile."""

    def add_to(self, report: CalibrationReport) -> None:
        """Add metrics of the rounding and the tuning to ``report``.

        Also add the names of the layers that no token has reached.
        """
        report.layers |= self.metrics
        report.tuned |= {} if self._tuning is None else self._tuning.metrics
        report.unreached += [n for n in self._layers if n in self._chosen and n not in self.metrics]

    def _tasks(self, members: Mapping[str, QuantizedLayer], collector: Collector) -> list[RoundingTask]:
        """Return the rounding tasks for the layers of an input group.

        The statistics in ``collector`` must be complete.
        """
        with self._clock.phase("statistics"):
            collector.flush()
        if collector is not self._counted:
            self._counted, self.flops = collector, self.flops + collector.flops
        return rounding_tasks(members, self._input_groups.siblings, collector.statistics, collector.held_out, self._ranks)

    def _keep(self, metrics: Mapping[str, Mapping[str, Any]], members: Iterable[str], collector: Collector) -> None:
        """Store the metrics and input samples of the rounded layers of an input group."""
        self.metrics |= {name: {"tokens": collector.tokens, **of_layer} for name, of_layer in metrics.items()}
        self.rounded |= set(members)
        self.inputs |= dict.fromkeys(members, collector.samples)
