"""Calibrate and round one block while forwards run through it: each layer when all forwards wait at it, its statistics complete.

This is true-sequential calibration for the price of one forward: the input of a layer comes from layers that are rounded already, and from
activations, keys and values among them, that are quantized with the scales they are shipped with.
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

__all__ = ["BlockRounding", "Layers", "round_to_nearest", "round_without_statistics", "rounded_by", "routed_prefixes"]

Layers = Mapping[str, tuple[nn.Module, QuantizedLayer]]


@attrs.frozen(eq=False)
class _Pause:
    """A place inside attention, where forwards wait until the scales of some activations are set.

    Attributes:
        number: Its position among the pause points of the block.
        keys: The activations.
    """

    number: float
    keys: tuple[Key, ...]


class BlockRounding:
    """Rounds the weights of one block and sets the scales of its activations, each when the inputs of all forwards are known.

    Args:
        block_run: The forwards, which wait at the block's entry.
        block: The block.
        layers: All its layers that are quantized, by full name: the float layer and the quantized one.
        rounding: Has ``needs``.
        input_groups: Tells which layers share an input; that of the run, which learns from block to block.
        scales: Of the block's activations.

    Attributes:
        taken: Full names of the layers that the rounding applies to; others are rounded to nearest.
        rounded: Full names of the layers whose weight is rounded.
        metrics: By layer that the rounding has rounded: what it and its validation report, and how many tokens reached the layer.
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
        expected = input_groups.expected([n.removeprefix(self._prefix) for n in layers])
        self._group_of = {self._prefix + n: [self._prefix + m for m in members] for n, members in expected.items()}
        for members in scales.sharing_outputs():
            # Keys and values: to have one scale, both must be rounded before a forward passes the first of them.
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
        places: list[PausePoint | _Pause | PooledExperts] = [place for f, place in stopped.items() if not f.is_float]
        if not places:
            # Float forwards alone wait: at experts that no token of the quantized model reaches.
            self._block_run.go_on(list(stopped))
            return
        first = min(places, key=lambda place: place.number)
        if isinstance(first, PausePoint):
            self._round_group(first)
        elif isinstance(first, PooledExperts):
            first.set_scales()
        else:
            self._scales.set_scales(first.keys)
        self._block_run.go_on(sorted((f for f, place in stopped.items() if place is first), key=lambda f: f.is_float))

    def _attention(self, name: str, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether an attention module is to quantize some tensors, whose scales are set when this returns; see `calibrating`."""
        forward = current_forward()
        if forward is None or forward.is_float:
            return False
        keys = tuple((self._prefix + name, attribute) for attribute in tensors)
        for (owner, attribute), x in zip(keys, tensors.values(), strict=True):
            self._scales.see(owner, attribute, x)
        if any(self._scales.wants(*key) for key in keys):
            # Before the pause points of those layers of the module that are not finished: its output projection.
            behind = [p.number for n, p in self._pause_points.items() if n.startswith(f"{self._prefix}{name}.") and not p.is_done]
            self._block_run.stop(self._pauses.setdefault(keys, _Pause(min(behind, default=len(self._pause_points)) - 0.5, keys)))
        return True

    def _round_group(self, leader: PausePoint) -> None:
        """Set the input scales of an input group at whose leader all forwards wait, round its layers, and let forwards pass them."""
        members = self._members(leader)
        inputs = {f: x for f, x in leader.arrived.items() if not f.is_float}
        for name in (m.name for m in members):
            self._scales.forget(name)  # of a layer that turned out to read another tensor than was expected
            for x in inputs.values() if self._scales.wants(name, INPUT) else ():
                self._scales.see(name, INPUT, x)
        self._scales.set_scales((m.name, INPUT) for m in members)
        taken = {m.name: m.quantized for m in members if m.name in self.taken}
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
        static = [m for m in members if self._scales.wants(m.name, OUTPUT)]
        for pause_point in static:
            for x in inputs.values():
                self._scales.see(pause_point.name, OUTPUT, pause_point.quantized.product(x))
        self._scales.set_scales((m.name, OUTPUT) for m in static)

    def _members(self, leader: PausePoint) -> list[PausePoint]:
        """The pause points whose layers can be rounded together with the leader's."""
        group = [self._pause_points[n] for n in self._group_of.get(leader.name, [leader.name])]
        spec = leader.quantized.layer_config.input_tensors
        return [p for p in group if not p.is_done and (p is leader or (not p.arrived and p.quantized.layer_config.input_tensors == spec))]

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
        collector = Collector(self._rounding.needs, first.shape[-1], first.device, tokens)
        floats = {f.number: x for f, x in leader.arrived.items() if f.is_float}
        # Tokens are routed differently in the float model: inputs of its experts are of other tokens.
        comparable = bool(floats) and not leader.name.startswith(self._routed)
        for forward, x in sorted(inputs.items(), key=lambda item: item[0].number):
            seen = tokens_of(x if quantizer is None else quantizer(x), forward.call)
            reference = floats.get(forward.number) if comparable else None
            same = reference is not None and reference.shape == x.shape
            collector.update(seen, tokens_of(reference, forward.call) if same and reference is not None else None)
        return collector


def rounded_by(rounding: Rounding, layers: Layers, prefix: str) -> set[str]:
    """Return the full names of the layers whose codes a rounding chooses: linear layers with quantized weights that it applies to."""
    return {n for n, (_, layer) in layers.items() if _has_input_channels(layer) and rounding.applies_to(n.removeprefix(prefix))}


def round_without_statistics(
    rounding: Rounding, block: Block, layers: Mapping[str, QuantizedLayer], siblings: Sequence[Sequence[str]], report: CalibrationReport
) -> set[str]:
    """Round the layers that a rounding without ``needs`` applies to; returns their names, and puts its metrics into the report."""
    prefix = f"{block.name}." if block.name else ""
    chosen = {n: layer for n, layer in layers.items() if _has_input_channels(layer) and rounding.applies_to(n.removeprefix(prefix))}
    for task in rounding_tasks(chosen, siblings):
        report.add({name: metrics for name, metrics in round_validated(rounding, task).items() if metrics})
    return set(chosen)


def round_to_nearest(layers: Mapping[str, QuantizedLayer], siblings: Sequence[Sequence[str]]) -> set[str]:
    """Round the weights of layers to nearest, those of siblings with one scale; returns the layers' names."""
    nearest = RoundToNearest()
    for task in rounding_tasks(layers, siblings):
        nearest.round(task)
    return set(layers)


def _has_input_channels(layer: QuantizedLayer) -> bool:
    module = layer.weight_quantizer
    return layer.planned_as is nn.Linear and module is not None and not module.quantizer.is_float


def routed_prefixes(block: Block) -> tuple[str, ...]:
    """Return the prefixes of the full names of experts' layers in a block."""
    names = (n for n, m in block.module.named_modules() if isinstance(m, SeparateExperts))
    return tuple(f"{block.name}.{n}.".lstrip(".") for n in names)
