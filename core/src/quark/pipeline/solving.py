"""Round the weights of one block while forwards run through it: each layer when all of them wait for it, its statistics complete.

That is true-sequential calibration for the price of one forward: whatever a layer gets comes from layers that are rounded already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
from torch import Tensor, nn

from quark.algorithms import Rounding
from quark.model.blocks import Block
from quark.model.inputs import shared_inputs
from quark.nn import QuantizedLayer, QuantizerModule
from quark.nn.experts import SeparateExperts
from quark.pipeline.collecting import Collector
from quark.pipeline.lockstep import Forward, LockStep, replaced_forward
from quark.pipeline.problems import problems
from quark.pipeline.stations import Station, tokens_of
from quark.pipeline.validated_rounding import round_validated
from quark.specs.architecture import Architecture


@attrs.define(eq=False)
class Company:
    """Which layers of a block read the same tensor: as the family's facts say, and as earlier blocks have shown.

    Attributes:
        architecture: Facts about the family, None where it is not known.
        groups: Suffixes of siblings that share a scale, and so must be rounded together.
    """

    architecture: Architecture | None
    groups: Sequence[Sequence[str]]
    _seen: list[set[str]] = attrs.field(factory=list, init=False)

    def of(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """The company of each layer that is said to have some; names are relative to the block."""
        found = shared_inputs(names, self.architecture, self.groups)
        for together in self._seen:
            members = tuple(n for n in names if n in together)
            found |= dict.fromkeys(members, members)
        return found

    def saw(self, names: set[str]) -> None:
        """These have turned out to read the same tensor."""
        joined = names.union(*(g for g in self._seen if g & names))
        self._seen = [*(g for g in self._seen if not g & joined), joined]


@attrs.frozen(eq=False)
class _Solved:
    """What was done last: for which inputs, of which layers, by what was collected."""

    names: set[str]
    inputs: Mapping[Forward, Tensor]
    seen: Collector
    input_spec: Any


class BlockSolver:
    """Rounds the layers of one block.

    Args:
        run: Forwards, of which all wait at the block's entry.
        block: Where they go through.
        layers: Of the block, by full name: the float layer and the quantized one.
        rounding: Has ``needs``.
        company: Which layers share an input.

    Attributes:
        figures: What is to be reported, by layer that was rounded: what the rounding and its validation say, and how many tokens the
            layer got.
    """

    def __init__(
        self,
        run: LockStep,
        block: Block,
        layers: Mapping[str, tuple[nn.Module, QuantizedLayer]],
        rounding: Rounding,
        company: Company,
    ) -> None:
        self._run = run
        self._rounding = rounding
        self._company = company
        self._prefix = f"{block.name}." if block.name else ""
        wanted = {n: pair for n, pair in layers.items() if rounding.takes(n.removeprefix(self._prefix))}
        self._stations = {n: Station(n, i, layer, made, run) for i, (n, (layer, made)) in enumerate(wanted.items())}
        inside = company.of([n.removeprefix(self._prefix) for n in wanted])
        self._company_of = {self._prefix + n: [self._prefix + m for m in members] for n, members in inside.items()}
        self._routed = routed_prefixes(block)
        self._last: _Solved | None = None
        self.figures: dict[str, dict[str, Any]] = {}

    def work(self, index: int) -> None:
        """Lead every forward through the block, which is the run's of that index."""
        with ExitStack() as stack:
            for station in self._stations.values():
                stack.enter_context(replaced_forward(station.layer, station))
            self._run.advance(index)
            while self._run.stopped:
                self._step()

    def _step(self) -> None:
        stopped = self._run.stopped
        waited_for: list[Station] = [s for f, s in stopped.items() if not f.is_float]
        if not waited_for:
            # Float forwards alone wait: at experts that no token of the quantized model reaches.
            self._run.go_on(list(stopped))
            return
        leader = min(waited_for, key=lambda s: s.number)
        self._solve(leader)
        self._run.go_on(sorted((f for f, s in stopped.items() if s is leader), key=lambda f: f.is_float))

    def _solve(self, leader: Station) -> None:
        members = self._members(leader)
        inputs = {f: x for f, x in leader.arrived.items() if not f.is_float}
        for station in members:
            _settle_input_scale(station.made, inputs)
        seen = self._known(leader, inputs)
        if seen is None:
            seen = self._collected(leader, inputs)
        for problem in problems({s.name: s.made for s in members}, self._company.groups, seen.statistics, seen.held_out()):
            for name, figures in round_validated(self._rounding, problem).items():
                self.figures[name] = {"tokens": seen.tokens, **figures}
        arrived = dict(leader.arrived)
        for station in members:
            station.done(None if station is leader else arrived)
        names = {s.name.removeprefix(self._prefix) for s in members}
        spec = leader.made.layer_config.input_tensors
        self._last = _Solved(names, inputs, seen, spec)

    def _members(self, leader: Station) -> list[Station]:
        """The stations whose layers can be rounded together with the leader's."""
        known = [self._stations[n] for n in self._company_of.get(leader.name, [leader.name])]
        spec = leader.made.layer_config.input_tensors
        return [s for s in known if not s.is_done and (s is leader or (not s.arrived and s.made.layer_config.input_tensors == spec))]

    def _known(self, leader: Station, inputs: Mapping[Forward, Tensor]) -> Collector | None:
        """What was collected for the last layers, if these turn out to read the same tensors."""
        last = self._last
        if last is None or last.input_spec != leader.made.layer_config.input_tensors:
            return None
        if inputs.keys() != last.inputs.keys() or any(last.inputs[f] is not x for f, x in inputs.items()):
            return None
        self._company.saw({*last.names, leader.name.removeprefix(self._prefix)})
        return last.seen

    def _collected(self, leader: Station, inputs: Mapping[Forward, Tensor]) -> Collector:
        quantizer = leader.made.input_quantizer
        first = next(iter(inputs.values()))
        tokens = sum(x.numel() // x.shape[-1] for x in inputs.values())
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


def _settle_input_scale(layer: QuantizedLayer, inputs: Mapping[Forward, Tensor]) -> None:
    """Give a static input quantizer the scale of what the layer is about to get."""
    module = static_input(layer)
    if module is None:
        return
    observer = module.quantizer.observer()
    for x in inputs.values():
        observer.observe(x)
    module.set_qparams(module.quantizer.qparams_from(observer))


def static_input(layer: QuantizedLayer) -> QuantizerModule | None:
    """The quantizer of a layer's input, where that has a scale to be found by calibration."""
    module = layer.input_quantizer
    return None if module is None or module.quantizer.is_dynamic or module.quantizer.is_float else module


def routed_prefixes(block: Block) -> tuple[str, ...]:
    """What the full names of experts' layers in a block begin with."""
    names = (n for n, m in block.module.named_modules() if isinstance(m, SeparateExperts))
    return tuple(f"{block.name}.{n}.".lstrip(".") for n in names)
