"""TwoPasses: rounds the weights of one block after a first run of all samples through the block.

This class is used if the memory is too small for the state of all forward passes that wait inside a block.
All samples run through the block twice. In the first run, all weights of the block are float, and the inputs
of layers and the activations with static scales are observed. In the second run, weights are rounded, and
activations are quantized as in the finished model. Only the block's inputs are stored for every sample.
Compared with `quark.calibration.block_rounding`, this class has two disadvantages. It computes each block
twice, and the statistics of a layer do not contain the rounding errors of earlier layers of the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
from torch import Tensor

from quark.calibration.activation_scales import INPUT, OUTPUT
from quark.calibration.attention import calibrating, inside_block
from quark.calibration.block_calibration import BlockCalibration
from quark.calibration.forwards import Forward, current_forward, replaced_forward
from quark.calibration.input_groups import common_groups
from quark.calibration.input_statistics import Collector
from quark.calibration.round_to_nearest import round_to_nearest
from quark.models.layers import QuantizedLayer


@attrs.define(eq=False, slots=False)
class TwoPasses(BlockCalibration):
    """Rounds weights and sets scales between two runs of all samples through the block.

    The arguments and attributes are those of `BlockCalibration`.
    """

    _leaders: dict[str, str] = attrs.field(init=False, factory=dict)
    _collectors: dict[str, Collector] = attrs.field(init=False, factory=dict)
    _tokens_of_first_call: dict[str, int] | None = attrs.field(init=False, default=None)
    _floats: dict[str, Tensor] = attrs.field(init=False, factory=dict)
    _is_finished: bool = attrs.field(init=False, default=False)

    def work(self) -> None:
        """Run every forward pass through the block twice, and round the block's layers in between."""
        with ExitStack() as stack:
            for name, (layer, quantized) in self._layers.items():
                stack.enter_context(replaced_forward(layer, self._forward_of(name, layer.forward, quantized)))
            stack.enter_context(calibrating(self._block.module, inside_block(self._scales.inside, self._block.prefix), self._attention))
            stack.callback(self._input_groups.end_block)
            forwards = self._block_run.forwards
            self._pass([f for f in forwards if f.number == 0])
            self._tokens_of_first_call = self._ranks.first(self._tokens_of_first_call)
            self._pass([f for f in forwards if f.number > 0])
            self._scales.finish()
            self._round()
            self._is_finished = True
            if self._tuning is None:
                self._block_run.enter()
            else:
                self._tuning.work()

    def _pass(self, forwards: Sequence[Forward]) -> None:
        """Run forward passes of the quantized model through the float block. They then wait at the entry
        again.

        The forward passes of the float model continue to the next block.
        """
        for forward in forwards:
            if forward.is_float:  # the float pass of a call comes first, so that its inputs can be compared with the other pass
                self._block_run.release([forward])
            else:
                if forward.number == 0:
                    self._tokens_of_first_call = {}
                self._block_run.replay(lambda *_: None, [forward])
                self._floats.clear()

    def _forward_of(self, name: str, plain: Callable[..., Any], quantized: QuantizedLayer) -> Callable[..., Any]:
        def forward_of_layer(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            forward = current_forward()
            if forward is None or forward.is_float:
                if forward is not None and self._is_observed(name):
                    self._floats[name] = x
                return plain(x, *args, **kwargs)
            if self._is_finished:
                return QuantizedLayer.forward(quantized, x, *args, **kwargs)
            self._scales.see(name, INPUT, x)
            if self._is_observed(name):
                self._collect(name, quantized, x, forward)
            y = plain(x, *args, **kwargs)
            self._scales.see(name, OUTPUT, y)
            return y

        return forward_of_layer

    def _attention(self, name: str, tensors: Mapping[str, Tensor]) -> bool:
        """Observe tensors of an attention module in the first run. Return whether the tensors shall be
        quantized.
        """
        forward = current_forward()
        if forward is None or forward.is_float:
            return False
        for attribute, x in tensors.items() if not self._is_finished else ():
            self._scales.see(self._block.prefix + name, attribute, x)
        return self._is_finished

    def _collect(self, name: str, quantized: QuantizedLayer, x: Tensor, forward: Forward) -> None:
        """Update the statistics of the layer's input group.

        Do nothing if another layer of the group has already updated the statistics with this input.
        """
        inside, spec = name.removeprefix(self._block.prefix), quantized.layer_config.input_tensors
        leader, is_new = self._input_groups.observe({forward: x}, inside, spec=spec)
        self._leaders.setdefault(name, leader)
        if not is_new:
            return
        grid, first = self._block_run.grid, self._tokens_of_first_call
        assert first is not None  # the first call runs before all others
        if forward.number == 0:
            first.setdefault(leader, x.numel() // x.shape[-1])
        count = first.get(leader, 0)  # each call is expected to have about as many tokens as the first one
        if leader not in self._collectors:
            self._collectors[leader] = Collector(self._needs, x.shape[-1], x.device, grid.calls * count, grid)
        quantizer = quantized.input_quantizer
        # A static scale is unknown before all inputs have been observed.
        is_ready = quantizer is not None and quantizer.quantizer.is_dynamic
        reference = None if name.startswith(self._routed) else self._floats.get(name)
        with self._clock.phase("statistics"):
            self._collectors[leader].take(x, quantizer if is_ready else None, reference, forward, forward.number * count)

    def _round(self) -> None:
        for names, leader in common_groups(self._leaders, list(self._layers), self._ranks):
            collector = self._collectors.pop(leader, None) if leader is not None else None
            if collector is None:  # no token of this rank has reached the layers
                weight: Any = self._layers[names[0]][1].weight
                collector = Collector(self._needs, weight.shape[1], weight.device, 0, self._block_run.grid)
            with self._clock.phase("statistics"):
                collector.complete()
            self._round_observed({name: self._layers[name][1] for name in names}, collector)
        # In the second run, tokens may reach an expert that no token has reached in the first run.
        others = {n: quantized for n, (_, quantized) in self._layers.items() if n not in self.rounded}
        with self._branches.made(others):
            self.rounded |= round_to_nearest(others, self._input_groups.siblings)
