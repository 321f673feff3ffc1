"""Finish one block while forwards run through it: each layer when all of them wait for it, its statistics complete.

That is true-sequential calibration for the price of one forward: whatever a layer gets comes from layers that are rounded already, and
from activations, keys and values among them, that are quantized with the scales they are shipped with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import attrs
from torch import Tensor, nn

from quark.algorithms import Rounding, RoundToNearest
from quark.calibration.activation_scales import INPUT, OUTPUT, ActivationScales, Key
from quark.calibration.attention import calibrating, inside_block
from quark.calibration.expert_pools import PooledExperts, pooled_experts
from quark.calibration.input_groups import InputGroups
from quark.calibration.input_statistics import Collector
from quark.calibration.lockstep import BlockRun, Forward, current_forward, replaced_forward
from quark.calibration.pause_points import PausePoint, number_of_tokens, tokens_of
from quark.calibration.report import CalibrationReport
from quark.calibration.rounding_tasks import rounding_tasks
from quark.calibration.rounding_validation import round_validated
from quark.modules import QuantizedLayer
from quark.modules.experts import SeparateExperts
from quark.planning.decoder_blocks import Block

Layers = Mapping[str, tuple[nn.Module, QuantizedLayer]]


@attrs.frozen(eq=False)
class _Pause:
    """A place inside attention, where forwards wait until scales are known."""

    number: float
    wanted: tuple[Key, ...]


class BlockRounding:
    """Finishes the layers of one block: rounds weights and sets the scales of activations, each when all that it gets is known.

    Args:
        block_run: The forwards, which wait at the block's entry.
        block: The block.
        layers: All its layers that are quantized, by full name: the float layer and the quantized one.
        rounding: Has ``needs``.
        input_groups: Tells which layers share an input; that of the run, which learns from block to block.
        scales: Of the block's activations.

    Attributes:
        taken: The layers that are for the rounding; others are rounded to nearest.
        rounded: The layers whose weight is rounded.
        metrics: What is to be reported, by layer that the rounding has rounded: what it and its validation say, and how many tokens the
            layer got.
    """

    def __init__(
        self,
        block_run: BlockRun,
        block: Block,
        layers: Layers,
        rounding: Rounding,
        input_groups: InputGroups,
        scales: ActivationScales,
    ) -> None:
        self._block_run = block_run
        self._block = block
        self._rounding = rounding
        self._input_groups = input_groups
        self._scales = scales
        self._prefix = f"{block.name}." if block.name else ""
        self._layers = layers
        self._pause_points: dict[str, PausePoint] = {}
        self.taken = rounded_by(rounding, layers, self._prefix)
        inside = input_groups.expected([n.removeprefix(self._prefix) for n in layers])
        self._group_of = {self._prefix + n: [self._prefix + m for m in members] for n, members in inside.items()}
        for members in scales.sharing_outputs():
            # Keys and values: to have one scale, both must be finished when the first of them is passed.
            for name in members:
                self._group_of.setdefault(name, list(members))
        self._routed = routed_prefixes(block)
        self._pauses: dict[tuple[Key, ...], _Pause] = {}
        self._collector: Collector | None = None
        self.rounded: set[str] = set()
        self.metrics: dict[str, dict[str, Any]] = {}

    def work(self) -> None:
        """Lead every forward through the block."""
        others = {n: quantized for n, (_, quantized) in self._layers.items() if n not in self.taken}
        self.rounded |= round_to_nearest(others, self._input_groups.siblings)
        layers = enumerate(self._layers.items())
        self._pause_points = {n: PausePoint(n, i, layer, quantized, self._block_run) for i, (n, (layer, quantized)) in layers}
        for name in others:
            if not self._scales.wants(name, INPUT) and not self._scales.wants(name, OUTPUT):
                self._pause_points[name].done()
        stand_in = None
        with ExitStack() as stack:
            stack.callback(self._input_groups.end_block)
            for pause_point in self._pause_points.values():
                stack.enter_context(replaced_forward(pause_point.layer, pause_point))
            for module, experts in pooled_experts(self._block, self._pause_points, self._scales, self._block_run):
                if module is self._block.module:
                    stand_in = experts.passed  # forwards wait at its entry: its forward cannot be replaced any more
                else:
                    stack.enter_context(replaced_forward(module, partial(experts.passed, module.forward)))
            stack.enter_context(calibrating(self._block.module, inside_block(self._scales.inside, self._prefix), self._attention))
            self._block_run.enter(stand_in)
            while self._block_run.state == "inside":
                self._step()

    def _step(self) -> None:
        stopped = self._block_run.stopped
        waited_for: list[PausePoint | _Pause | PooledExperts] = [s for f, s in stopped.items() if not f.is_float]
        if not waited_for:
            # Float forwards alone wait: at experts that no token of the quantized model reaches.
            self._block_run.go_on(list(stopped))
            return
        leader = min(waited_for, key=lambda s: s.number)
        if isinstance(leader, PausePoint):
            self._solve(leader)
        elif isinstance(leader, PooledExperts):
            leader.set_scales()
        else:
            self._scales.set_scales(leader.wanted)
        self._block_run.go_on(sorted((f for f, s in stopped.items() if s is leader), key=lambda f: f.is_float))

    def _attention(self, name: str, tensors: Mapping[str, Tensor]) -> bool:
        """In place of the quantizers of an attention module: whether to quantize what it is about to use. Their scales are set then."""
        forward = current_forward()
        if forward is None or forward.is_float:
            return False
        wanted = tuple((self._prefix + name, attribute) for attribute in tensors)
        for (owner, attribute), x in zip(wanted, tensors.values(), strict=True):
            self._scales.see(owner, attribute, x)
        if any(self._scales.wants(*key) for key in wanted):
            # Its place is before those of the module's layers that are not finished, which is what closes attention.
            behind = [s.number for n, s in self._pause_points.items() if n.startswith(f"{self._prefix}{name}.") and not s.is_done]
            self._block_run.stop(self._pauses.setdefault(wanted, _Pause(min(behind, default=len(self._pause_points)) - 0.5, wanted)))
        return True

    def _solve(self, leader: PausePoint) -> None:
        members = self._members(leader)
        inputs = {f: x for f, x in leader.arrived.items() if not f.is_float}
        for name in (s.name for s in members):
            self._scales.forget(name)  # of a layer that turned out to get something else than it was finished for
            for x in inputs.values() if self._scales.wants(name, INPUT) else ():
                self._scales.see(name, INPUT, x)
        self._scales.set_scales((s.name, INPUT) for s in members)
        taken = {s.name: s.quantized for s in members if s.name in self.taken}
        if taken:
            collector = self._statistics_of(leader, members, inputs)
            for task in rounding_tasks(taken, self._input_groups.siblings, collector.statistics, collector.held_out()):
                for name, metrics in round_validated(self._rounding, task).items():
                    self.metrics[name] = {"tokens": collector.tokens, **metrics}
            self.rounded |= set(taken)
        self._set_output_scales(members, inputs)
        arrived = dict(leader.arrived)
        for pause_point in members:
            pause_point.done(None if pause_point is leader else arrived)

    def _set_output_scales(self, members: Sequence[PausePoint], inputs: Mapping[Forward, Tensor]) -> None:
        wanted = [s for s in members if self._scales.wants(s.name, OUTPUT)]
        for pause_point in wanted:
            for x in inputs.values():
                self._scales.see(pause_point.name, OUTPUT, pause_point.quantized.product(x))
        self._scales.set_scales((s.name, OUTPUT) for s in wanted)

    def _members(self, leader: PausePoint) -> list[PausePoint]:
        """The pause points whose layers can be rounded together with the leader's."""
        known = [self._pause_points[n] for n in self._group_of.get(leader.name, [leader.name])]
        spec = leader.quantized.layer_config.input_tensors
        return [s for s in known if not s.is_done and (s is leader or (not s.arrived and s.quantized.layer_config.input_tensors == spec))]

    def _statistics_of(self, leader: PausePoint, members: Sequence[PausePoint], inputs: Mapping[Forward, Tensor]) -> Collector:
        """The statistics of the members' input: those collected for the layers before, if these turn out to read the same tensors."""
        names = [leader.name, *(m.name for m in members if m is not leader)]
        spec = leader.quantized.layer_config.input_tensors
        _, is_new = self._input_groups.observe(inputs, *(n.removeprefix(self._prefix) for n in names), spec=spec)
        if is_new or self._collector is None:
            self._collector = self._collected(leader, inputs)
        return self._collector

    def _collected(self, leader: PausePoint, inputs: Mapping[Forward, Tensor]) -> Collector:
        quantizer = leader.quantized.input_quantizer
        first = next(iter(inputs.values()))
        tokens = sum(number_of_tokens(x, forward.call) for forward, x in inputs.items())
        found = Collector(self._rounding.needs, first.shape[-1], first.device, tokens)
        floats = {f.number: x for f, x in leader.arrived.items() if f.is_float}
        # Tokens are routed differently in the float model: theirs are none to compare with.
        comparable = bool(floats) and not leader.name.startswith(self._routed)
        for forward, x in sorted(inputs.items(), key=lambda item: item[0].number):
            seen = tokens_of(x if quantizer is None else quantizer(x), forward.call)
            reference = floats.get(forward.number) if comparable else None
            same = reference is not None and reference.shape == x.shape
            found.update(seen, tokens_of(reference, forward.call) if same and reference is not None else None)
        return found


def rounded_by(rounding: Rounding, layers: Layers, prefix: str) -> set[str]:
    """Full names of the layers whose codes a rounding chooses: those that multiply their input by a matrix of codes, and that it takes."""
    return {n for n, (_, made) in layers.items() if _has_input_channels(made) and rounding.applies_to(n.removeprefix(prefix))}


def round_without_statistics(
    rounding: Rounding, block: Block, layers: Mapping[str, QuantizedLayer], siblings: Sequence[Sequence[str]], report: CalibrationReport
) -> set[str]:
    """Round the layers that a rounding without ``needs`` applies to; returns their names, and puts its metrics into the report."""
    prefix = f"{block.name}." if block.name else ""
    chosen = {n: layer for n, layer in layers.items() if _has_input_channels(layer) and rounding.applies_to(n.removeprefix(prefix))}
    for task in rounding_tasks(chosen, siblings):
        report.add({name: metrics for name, metrics in round_validated(rounding, task).items() if metrics})
    return set(chosen)


def round_to_nearest(layers: Mapping[str, QuantizedLayer], groups: Sequence[Sequence[str]]) -> set[str]:
    """Round the weights of layers to nearest, those of one group with one scale; returns the layers' names."""
    nearest = RoundToNearest()
    for problem in rounding_tasks(layers, groups):
        nearest.round(problem)
    return set(layers)


def _has_input_channels(layer: QuantizedLayer) -> bool:
    module = layer.weight_quantizer
    return layer.planned_as is nn.Linear and module is not None and not module.quantizer.is_float


def routed_prefixes(block: Block) -> tuple[str, ...]:
    """What the full names of experts' layers in a block begin with."""
    names = (n for n, m in block.module.named_modules() if isinstance(m, SeparateExperts))
    return tuple(f"{block.name}.{n}.".lstrip(".") for n in names)
