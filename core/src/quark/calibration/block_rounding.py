"""Calibrate and round one block while forward passes run through it.

A layer is rounded when all forward passes wait in front of it, because the statistics of its input are
complete then. The input has been computed by rounded layers, from activations (including keys and values)
that are quantized with their final scales. So this is true-sequential calibration, but it costs only one
forward pass per sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any

import attrs
from torch import Tensor

from quark.calibration.activation_scales import INPUT, OUTPUT, ActivationScales, Key
from quark.calibration.attention import calibrating, inside_block
from quark.calibration.block_calibration import BlockCalibration
from quark.calibration.forwards import Forward, current_forward, replaced_forward
from quark.calibration.input_statistics import Collector
from quark.calibration.pause_points import PausePoint, PooledExperts, pooled_experts
from quark.calibration.round_to_nearest import round_to_nearest


@attrs.frozen(eq=False)
class _Pause:
    """A place inside attention where forward passes wait until the scales of some activations are set.

    Attributes:
        number: Position of this place among the pause points of the block.
        name: Keys of the activations. Two pauses never have the same keys.
        scales: The scales of the block's activations.
    """

    number: float
    name: tuple[Key, ...]
    scales: ActivationScales

    def set_scales(self) -> None:
        """Set the scales of the activations whose keys are in ``name``."""
        self.scales.set_scales(self.name)


@attrs.frozen
class _Waiting:
    """The first place in a block where forward passes of a rank wait.

    Attributes:
        number: Position of the place. Infinite if only forward passes of the float model wait.
        name: Name of the place. None if only forward passes of the float model wait.
    """

    number: float
    name: Any


@attrs.define(eq=False, slots=False)
class BlockRounding(BlockCalibration):
    """Rounds each weight and sets each scale as soon as every forward pass has computed the layer's input.

    The arguments and attributes are those of `BlockCalibration`.
    """

    _group_of: dict[str, list[str]] = attrs.field(init=False)
    _pause_points: dict[str, PausePoint] = attrs.field(init=False, factory=dict)
    _places: dict[Any, PausePoint | _Pause | PooledExperts] = attrs.field(init=False, factory=dict)
    _collector: Collector | None = attrs.field(init=False, default=None)

    @_group_of.default
    def _expected_groups(self) -> dict[str, list[str]]:
        """Return a dictionary from each layer to the layers that are expected to be rounded together with
        it.
        """
        expected = self._input_groups.expected([n.removeprefix(self._block.prefix) for n in self._layers])
        group_of = {self._block.prefix + n: [self._block.prefix + m for m in members] for n, members in expected.items()}
        for members in self._scales.sharing_outputs():
            # Keys and values have a common scale only if both of their layers are rounded before a forward
            # pass continues beyond the first of these layers.
            for name in members:
                group_of.setdefault(name, list(members))
        return group_of

    def work(self) -> None:
        """Run every forward pass through the block, and round the block's layers meanwhile."""
        others = {n: quantized for n, (_, quantized) in self._layers.items() if not self._is_observed(n)}
        with self._clock.phase("solve"), self._branches.made(others):
            self.rounded |= round_to_nearest(others, self._input_groups.siblings)
        layers = enumerate(self._layers.items())
        self._pause_points = {n: PausePoint(n, i, layer, quantized, self._block_run) for i, (n, (layer, quantized)) in layers}
        for name in others:
            if not self._scales.wants(name, INPUT) and not self._scales.wants(name, OUTPUT):
                self._pause_points[name].done()
        self._places = dict(self._pause_points)
        stand_in = None
        with ExitStack() as stack:
            stack.callback(self._input_groups.end_block)
            for pause_point in self._pause_points.values():
                stack.enter_context(replaced_forward(pause_point.layer, pause_point))
            for module, experts in pooled_experts(self._block, self._pause_points, self._scales, self._block_run):
                self._places[experts.name] = experts
                if module is self._block.module:
                    stand_in = experts.passed  # its forward pass has begun, so it is too late to replace its `forward`
                else:
                    stack.enter_context(replaced_forward(module, partial(experts.passed, module.forward)))
            stack.enter_context(calibrating(self._block.module, inside_block(self._scales.inside, self._block.prefix), self._attention))
            if self._tuning is None:
                self._block_run.enter(stand_in)
            else:
                self._tuning.rehearse(stand_in)
            while (waiting := self._first_waiting()) is not None:
                place = self._place(waiting)
                if isinstance(place, PausePoint):
                    self._round_group(place)
                elif place is not None:
                    place.set_scales()
                self._go_on_from(place)
            if self._tuning is not None:
                self._block_run.end_rehearsal()
                self._finish_unreached()
                self._tuning.work()

    def _finish_unreached(self) -> None:
        """Set the scales of the layers that no token has reached, and round these layers to nearest.

        A later forward pass may still reach such a layer, because other layers have changed meanwhile.
        """
        self._scales.finish()
        unreached = {n: p.quantized for n, p in self._pause_points.items() if n not in self.rounded}
        with self._branches.made(unreached):
            self.rounded |= round_to_nearest(unreached, self._input_groups.siblings)
        for pause_point in self._pause_points.values():
            pause_point.done()

    def _first_waiting(self) -> _Waiting | None:
        """Return the first place in the block where forward passes of any rank wait.

        Return None if no forward pass waits inside the block.
        """
        stopped = self._block_run.stopped
        places = [place for f, place in stopped.items() if not f.is_float]
        by_number = attrgetter("number")
        first = min((_Waiting(p.number, p.name) for p in places), default=_Waiting(math.inf, None) if stopped else None, key=by_number)
        return min((w for w in self._ranks.gather(first) if w is not None), default=None, key=by_number)

    def _go_on_from(self, place: PausePoint | _Pause | PooledExperts | None) -> None:
        """Resume the forward passes of this rank that wait at ``place``.

        If ``place`` is None, resume all forward passes of this rank that wait in the block.
        """
        waiting = [f for f, place_of_forward in self._block_run.stopped.items() if place is None or place_of_forward is place]
        if waiting:
            self._block_run.go_on(sorted(waiting, key=lambda f: f.is_float))

    def _place(self, waiting: _Waiting) -> PausePoint | _Pause | PooledExperts | None:
        """Return this rank's own object for the place that ``waiting`` describes.

        Return None if only forward passes of the float model wait. They then wait at an expert that no token
        of the quantized model reaches.
        """
        if waiting.name is None:
            return None
        if isinstance(waiting.name, tuple):
            return self._places.setdefault(waiting.name, _Pause(waiting.number, waiting.name, self._scales))
        place = self._places[waiting.name]
        if isinstance(place, PausePoint) and place.is_done:
            place.reopen()  # other ranks have reopened it, because their forward passes had an unexpected input
        return place

    def _attention(self, name: str, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether an attention module shall quantize its tensors. This method is the callback of
        `calibrating`.

        Before the method returns True, it waits until the scales of these tensors are set.
        """
        forward = current_forward()
        if forward is None or forward.is_float:
            return False
        keys = tuple((self._block.prefix + name, attribute) for attribute in tensors)
        for (owner, attribute), x in zip(keys, tensors.values(), strict=True):
            self._scales.see(owner, attribute, x)
        if any(self._scales.wants(*key) for key in keys):
            # The position is before the pause points of the module's unfinished layers, such as the output
            # projection.
            behind = [p.number for n, p in self._pause_points.items() if n.startswith(f"{self._block.prefix}{name}.") and not p.is_done]
            number = min(behind, default=len(self._pause_points)) - 0.5
            self._block_run.stop(self._places.setdefault(keys, _Pause(number, keys, self._scales)))
        return True

    def _round_group(self, leader: PausePoint) -> None:
        """Set the input scales of an input group, round its layers, and mark these layers as finished.

        All forward passes must wait at ``leader``, the first layer of the group.
        """
        agreed = set.intersection(*self._ranks.gather({m.name for m in self._members(leader)}))
        members = [m for m in self._members(leader) if m.name in agreed]
        inputs = {f: x for f, x in leader.arrived.items() if not f.is_float}
        for name in (m.name for m in members):
            self._scales.forget(name)  # it has scales only if the layer read another tensor than expected
            for x in inputs.values() if self._scales.wants(name, INPUT) else ():
                self._scales.see(name, INPUT, x)
        self._scales.set_scales((m.name, INPUT) for m in members)
        observed = {m.name: m.quantized for m in members if self._is_observed(m.name)}
        if observed:
            self._round_observed(observed, self._statistics_of(leader, members, inputs))
        self._set_output_scales(members, inputs)
        arrived = dict(leader.arrived)
        for pause_point in members:
            pause_point.done(None if pause_point is leader else arrived)

    def _set_output_scales(self, members: Sequence[PausePoint], inputs: Mapping[Forward, Tensor]) -> None:
        static = [m for m in members if self._scales.wants(m.name, OUTPUT)]
        for pause_point in static:
            for x in inputs.values():
                self._scales.see(pause_point.name, OUTPUT, pause_point.quantized.with_branch(x))
        self._scales.set_scales((m.name, OUTPUT) for m in static)

    def _members(self, leader: PausePoint) -> list[PausePoint]:
        """Return the pause points of all layers that can be rounded together with the layer of ``leader``."""
        group = [self._pause_points[n] for n in self._group_of.get(leader.name, [leader.name])]
        spec = leader.quantized.layer_config.input_tensors
        return [p for p in group if not p.is_done and (p is leader or (not p.arrived and p.quantized.layer_config.input_tensors == spec))]

    def _statistics_of(self, leader: PausePoint, members: Sequence[PausePoint], inputs: Mapping[Forward, Tensor]) -> Collector:
        """Return the statistics of the input that the layers of ``members`` share.

        If the layers that were rounded just before read the same tensors, their statistics are returned.
        """
        names = [leader.name, *(m.name for m in members if m is not leader)]
        spec = leader.quantized.layer_config.input_tensors
        inside = [n.removeprefix(self._block.prefix) for n in names]
        _, is_new = self._input_groups.observe(inputs, *inside, spec=spec, ranks=self._ranks)
        if is_new or self._collector is None or self._collector.is_of_outputs:
            with self._clock.phase("statistics"):
                self._collector = self._collected(leader, inputs, is_alone=len(members) == 1)
        return self._collector

    def _collected(self, leader: PausePoint, inputs: Mapping[Forward, Tensor], *, is_alone: bool) -> Collector:
        quantizer, weight = leader.quantized.input_quantizer, leader.quantized.weight
        rows, columns = weight.shape  # type: ignore[misc]
        counts = self._ranks.gather(sum(x.numel() // x.shape[-1] for x in inputs.values()))
        position = sum(counts[: self._ranks.rank])
        kinds, grid = self._needs, self._block_run.grid
        # The float model may route tokens to other experts, so the inputs of its experts belong to other
        # tokens.
        is_routed = leader.name.startswith(self._routed)
        floats = {f.number: x for f, x in leader.arrived.items() if f.is_float and not is_routed}
        all_are_known = all(f.number in floats and floats[f.number].shape == x.shape for f, x in inputs.items())
        outputs = None
        if is_alone and not is_routed and rows < columns and any(k.of_outputs for k in kinds) and self._ranks.all(all_are_known):
            outputs, floats = rows, {f.number: leader.float_output(f) for f in leader.arrived if f.is_float}
        # The forward passes wait until the layers are rounded, so their inputs stay unchanged until then.
        collector = Collector(kinds, columns, weight.device, sum(counts), grid, outputs=outputs, inputs_last=True)  # type: ignore[arg-type]
        for forward, x in sorted(inputs.items(), key=lambda item: item[0].number):
            position += collector.take(x, quantizer, floats.get(forward.number), forward, position)
        collector.complete()
        return collector
