"""Round the weights of one block between two plain passes: the fallback where memory cannot hold what forwards keep while they wait inside.

The first pass shows each layer's input, and every activation that has a static scale, while all weights of the block are still float; the
second goes on with rounded ones, and with activations quantized as the finished model quantizes them. Only what enters the block is held
for every sample. Twice the work of `quark.calibration.block_rounding`, and layers are not rounded for what the rounded layers before them
in the same block give, but it needs no more than the block's own inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from quark.algorithms import Rounding
from quark.calibration.activation_scales import INPUT, OUTPUT, ActivationScales
from quark.calibration.attention import calibrating, inside_block
from quark.calibration.block_rounding import InputGroups, Layers, round_to_nearest, rounded_by, routed_prefixes
from quark.calibration.input_statistics import Collector
from quark.calibration.lockstep import Forward, LockStep, current_forward, replaced_forward
from quark.calibration.pause_points import number_of_tokens, tokens_of
from quark.calibration.rounding_tasks import rounding_tasks
from quark.calibration.rounding_validation import round_validated
from quark.modules import QuantizedLayer
from quark.planning.decoder_blocks import Block


class TwoPasses:
    """Finishes the layers of one block; takes and gives what `quark.calibration.block_rounding.BlockRounding` does."""

    def __init__(
        self, run: LockStep, block: Block, layers: Layers, rounding: Rounding, input_groups: InputGroups, scales: ActivationScales
    ) -> None:
        self._run = run
        self._block = block
        self._rounding = rounding
        self._groups = input_groups.groups
        self._scales = scales
        self._prefix = f"{block.name}." if block.name else ""
        self._layers = layers
        self._routed = routed_prefixes(block)
        self._leaders: dict[str, str] = {}
        self._seen: dict[str, Collector] = {}
        self._last: tuple[Forward | None, str, Tensor | None] = (None, "", None)
        self._floats: dict[tuple[int, str], Tensor] = {}
        self._is_finished = False
        self.taken = rounded_by(rounding, layers, self._prefix)
        self.rounded: set[str] = set()
        self.metrics: dict[str, dict[str, Any]] = {}

    def work(self, index: int) -> None:
        """Lead every forward through the block, which is the run's of that index."""
        with ExitStack() as stack:
            self._run.detours[index] = self._passed
            for name, (layer, made) in self._layers.items():
                stack.enter_context(replaced_forward(layer, self._shown(name, layer.forward, made)))
            stack.enter_context(calibrating(self._block.module, inside_block(self._scales.inside, self._prefix), self._attention))
            self._run.advance(index)
            self._scales.finish()
            self._round()
            self._is_finished = True
            self._run.go_on(list(self._run.stopped))
            del self._run.detours[index]

    def _passed(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of the block's forward."""
        forward = current_forward()
        if forward is None or forward.is_float:
            return plain(*args, **kwargs)
        forward.rehearsal = self
        plain(*args, **kwargs)
        forward.rehearsal = None
        for name in [key for key in self._floats if key[0] == forward.number]:
            del self._floats[name]
        self._run.stop(self)
        return plain(*args, **kwargs)

    def _shown(self, name: str, plain: Callable[..., Any], made: QuantizedLayer) -> Callable[..., Any]:
        def forward_of_layer(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            forward = current_forward()
            if forward is None or forward.is_float:
                if forward is not None and name in self.taken:
                    self._floats[(forward.number, name)] = x
                return plain(x, *args, **kwargs)
            if self._is_finished:
                return QuantizedLayer.forward(made, x, *args, **kwargs)
            self._scales.see(name, INPUT, x)
            if name in self.taken:
                self._see(name, made, x, forward)
            y = plain(x, *args, **kwargs)
            self._scales.see(name, OUTPUT, y)
            return y

        return forward_of_layer

    def _attention(self, name: str, tensors: Mapping[str, Tensor]) -> bool:
        """In place of the quantizers of an attention module: whether to quantize what it is about to use."""
        forward = current_forward()
        if forward is None or forward.is_float:
            return False
        for attribute, x in tensors.items() if not self._is_finished else ():
            self._scales.see(self._prefix + name, attribute, x)
        return self._is_finished

    def _see(self, name: str, made: QuantizedLayer, x: Tensor, forward: Forward) -> None:
        """Take the input of a layer into the statistics of the first one that reads the same tensor, which is where both are one."""
        last_forward, last_name, last_x = self._last
        same = last_forward is forward and last_x is x
        leader = self._leaders.setdefault(name, self._leaders.get(last_name, name) if same and self._alike(name, last_name) else name)
        self._last = (forward, name, x)
        if leader != name:
            return
        if name not in self._seen:
            tokens = self._run.calls * number_of_tokens(x, forward.call)  # calls are about alike
            self._seen[name] = Collector(self._rounding.needs, x.shape[-1], x.device, tokens)
        quantizer = made.input_quantizer
        # A static scale is not known before all inputs have been seen.
        is_ready = quantizer is not None and quantizer.quantizer.is_dynamic
        seen = tokens_of(quantizer(x) if quantizer is not None and is_ready else x, forward.call)
        reference = None if name.startswith(self._routed) else self._floats.get((forward.number, name))
        same_shape = reference is not None and reference.shape == x.shape
        self._seen[name].update(seen, tokens_of(reference, forward.call) if same_shape and reference is not None else None)

    def _alike(self, name: str, other: str) -> bool:
        """Whether two layers quantize their input alike."""
        return bool(self._layers[name][1].layer_config.input_tensors == self._layers[other][1].layer_config.input_tensors)

    def _round(self) -> None:
        together: dict[str, dict[str, QuantizedLayer]] = {}
        for name, leader in self._leaders.items():
            together.setdefault(leader, {})[name] = self._layers[name][1]
        for leader, members in together.items():
            seen = self._seen.pop(leader)
            for problem in rounding_tasks(members, self._groups, seen.statistics, seen.held_out()):
                for name, metrics in round_validated(self._rounding, problem).items():
                    self.metrics[name] = {"tokens": seen.tokens, **metrics}
        # The second pass may route tokens to an expert that the first did not reach.
        others = {n: made for n, (_, made) in self._layers.items() if n not in self._leaders}
        self.rounded = round_to_nearest(others, self._groups) | set(self._leaders)
