"""BlockTuning: applies the tunings of a run to one rounded block.

A tuning gets targets and can compute outputs with gradients. Its result is validated on held-out tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import OutputError, RoundedBlock, Sample, Tuning, validated, weight_quantizer
from quark.calibration.forwards import Forward
from quark.calibration.held_out import held_out_ends
from quark.calibration.lockstep import BlockRun
from quark.calibration.phases import PhaseClock
from quark.calibration.round_to_nearest import tensor_of
from quark.models.layers import QuantizedLayer, linear_weight
from quark.models.plan.decoder_blocks import Block
from quark.numbers import QParams


@attrs.define(eq=False, slots=False)
class BlockTuning:
    """Tunes one block while calibration forward passes wait at its entry.

    Args:
        block_run: The forward passes. The passes of the float model are released to the next block.
        block: The block, with float weights.
        layers: A mapping from the full name of each quantized layer to the float layer and the quantized
            layer.
        tuned: Full names of the layers whose codes the tunings may change.
        tunings: Tunings by name, in the order in which they are applied.
        keeps_floats: Whether the forward passes of the float model must wait until the block is rounded,
            because the rounding uses them.
        clock: Measures the time of the tunings.

    Attributes:
        metrics: A mapping from the full name of a layer, or of the block, to a mapping from the name of a
            tuning to its metrics. The metrics of the block include the validation of the tuning.
    """

    _block_run: BlockRun
    _block: Block
    _layers: Mapping[str, tuple[nn.Module, QuantizedLayer]]
    _tuned: Collection[str]
    _tunings: Mapping[str, Tuning]
    _keeps_floats: bool
    _clock: PhaseClock
    metrics: dict[str, dict[str, Any]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._forwards = {f.number: f for f in self._block_run.forwards if not f.is_float}
        self._samples: dict[bool, dict[int, Sample]] = {True: {}, False: {}}
        self._outputs: dict[Forward, Any] = {}
        self._quantized = {n.removeprefix(self._block.prefix): layer for n, (_, layer) in self._layers.items()}
        with self._clock.phase("forward"):
            if not all(tuning.wants_float for tuning in self._tunings.values()):
                self._block_run.replay(self._see_target, self._forwards.values())
            if not self._keeps_floats:
                self._release_floats()

    def _release_floats(self) -> None:
        self._block_run.release([f for f in self._block_run.forwards if f.is_float], self._see_target)

    def _see_target(self, forward: Forward, output: Any) -> None:
        """Store ``output`` of the float block. It is the target of the tuning for the call that ``forward``
        runs.
        """
        stream = tensor_of(output).detach()
        target = stream.flatten(0, -2).clone()
        held_out = held_out_ends(torch.arange(len(target), device=stream.device) // stream.shape[-2])
        self._samples[forward.is_float][forward.number] = Sample(forward.number, target, held_out)

    def rehearse(self, stand_in: Callable[..., Any] | None) -> None:
        """Start the forward passes through the block, which is rounded meanwhile. Store the block's outputs.

        The argument ``stand_in`` is passed to `BlockRun.rehearse`.
        """
        self._block_run.rehearse(self._see_output, stand_in)

    def _see_output(self, forward: Forward, output: Any) -> None:
        if not forward.is_float:
            self._outputs[forward] = output

    def work(self) -> None:
        """Apply the tunings one after another, and let the forward passes leave the block.

        All layers of the block must have been rounded.
        """
        with self._clock.phase("forward"):
            self._release_floats()
        if not self._outputs:
            self._outputs = self._computed()
        for name, tuning in self._tunings.items():
            self._tune(name, tuning)
        self._block_run.leave(self._outputs)

    def _computed(self) -> dict[Forward, Any]:
        with self._clock.phase("forward"):
            return self._block_run.replay(lambda _, output: output, self._forwards.values())

    def _tune(self, name: str, tuning: Tuning) -> None:
        block = self._rounded_block(tuning)
        if not block.samples:
            return  # no sample goes through the block; for example, samples without images skip cross-attention
        state, before = _State.of(block), self._error(block, self._outputs)
        with self._clock.phase("tune"):
            metrics = {f"{self._block.prefix}{layer}" if layer else self._block.name: {**own} for layer, own in tuning.tune(block).items()}
        outputs = self._computed()
        validation = validated([before], [self._error(block, outputs)])
        if validation.is_improvement:
            self._outputs = outputs
        else:
            state.restore(block)
        metrics.setdefault(self._block.name, {}).update(applied=validation.is_improvement, **validation.metrics())
        for layer, values in metrics.items():
            self.metrics.setdefault(layer, {})[name] = values

    def _rounded_block(self, tuning: Tuning) -> RoundedBlock:
        chosen = {n.removeprefix(self._block.prefix): pair for n, pair in self._layers.items() if n in self._tuned}
        samples = self._samples[tuning.wants_float]
        return RoundedBlock(
            self._block.name,
            {n: quantized for n, (_, quantized) in chosen.items()},
            {n: linear_weight(layer).detach() for n, (layer, _) in chosen.items()},
            self._parameters(),
            [samples[number] for number in sorted(samples)],
            self._output,
            self._substituted,
        )

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return those float parameters of the block that are vectors, as a dictionary from name to
        parameter.

        The bias of a quantized layer is the parameter of the quantized layer, not of the float layer.
        """
        found = {}
        for name, parameter in self._block.module.named_parameters():
            owner, _, attribute = name.rpartition(".")
            layer = self._quantized.get(owner)
            if parameter.ndim == 1 and (layer is None or layer.bias_quantizer is None):
                found[name] = parameter if layer is None else getattr(layer, attribute)
        return found

    def _output(self, sample: Sample, dtype: torch.dtype | None = None) -> Tensor:
        """Return the block's output for a sample, as in `RoundedBlock.output`."""
        forward = self._forwards[sample.number]
        gradients = torch.is_grad_enabled()
        device = sample.target.device.type
        try:
            with torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False):
                return self._block_run.replay(_tokens, [forward], with_gradients=gradients)[forward]
        finally:
            torch.set_grad_enabled(gradients)

    @contextmanager
    def _substituted(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace parameters by ``tensors`` while the body of the ``with`` statement runs.

        This implements `RoundedBlock.substituted`.
        """
        places = []
        for name, tensor in tensors.items():
            owner, _, attribute = name.rpartition(".")
            module: nn.Module = self._quantized[owner] if owner in self._quantized else self._block.module.get_submodule(owner)
            places.append((module, attribute, module._parameters.pop(attribute)))
            module.__dict__[attribute] = tensor
        try:
            yield
        finally:
            for module, attribute, parameter in places:
                del module.__dict__[attribute]
                module._parameters[attribute] = parameter

    def _error(self, block: RoundedBlock, outputs: Mapping[Forward, Any]) -> OutputError:
        """Return the output error on the held-out tokens, or on all tokens if no token is held out."""
        is_held_out = any(bool(sample.is_held_out.any()) for sample in block.samples)
        errors = []
        for sample in block.samples:
            output = _tokens(self._forwards[sample.number], outputs[self._forwards[sample.number]])
            chosen = sample.is_held_out if is_held_out else torch.ones_like(sample.is_held_out)
            errors.append(OutputError.of(output[chosen], sample.target[chosen], channels=block.channels, is_held_out=is_held_out))
        return OutputError.joined(errors)


def _tokens(_: Forward, output: Any) -> Tensor:
    return tensor_of(output).flatten(0, -2)


@attrs.frozen(eq=False)
class _State:
    """A copy of the weights, scales and float parameters that a block had before it was tuned."""

    weights: Mapping[str, tuple[nn.Parameter, QParams | None, Tensor | None]]
    parameters: Mapping[str, Tensor]

    @classmethod
    def of(cls, block: RoundedBlock) -> _State:
        modules = {n: (layer.weight, weight_quantizer(layer)) for n, layer in block.layers.items()}
        weights = {n: (weight, module.qparams, module.codes) for n, (weight, module) in modules.items()}
        return cls(weights, {n: p.detach().clone() for n, p in block.parameters.items()})  # type: ignore[arg-type]

    @torch.no_grad()
    def restore(self, block: RoundedBlock) -> None:
        for name, (weight, qparams, codes) in self.weights.items():
            block.layers[name].weight = weight
            if qparams is not None:
                weight_quantizer(block.layers[name]).set_qparams(qparams, codes=codes)
        for name, values in self.parameters.items():
            block.parameters[name].copy_(values)
