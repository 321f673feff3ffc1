"""PausePoint: replaces the ``forward`` method of a layer while its block is calibrated.

A forward pass waits at a pause point until the layer's weight is rounded.

PooledExperts: replaces the ``forward`` method of a module that calls experts whose inputs share one scale.
This scale must be known before the first expert is rounded. But a forward pass reaches an expert only after
the previous expert, and the last projection of an expert reads the output of rounded projections. So forward
passes rehearse: they compute the module several times and discard the output. The first rehearsal observes
the inputs of each expert. Before the second rehearsal, the first projections are rounded. The second
rehearsal then observes the inputs of the next projections, and so on. A rehearsal costs little, because it
does not compute the layers that depend on an observed layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quark.calibration.activation_scales import INPUT, ActivationScales, Key
from quark.calibration.batches import Call
from quark.calibration.forwards import Forward, current_forward
from quark.calibration.lockstep import BlockRun
from quark.models.layers import QuantizedLayer
from quark.models.plan.decoder_blocks import Block


class PausePoint:
    """Replaces the ``forward`` method of one layer.

    A forward pass stops here until the layer's weight is rounded and the scales of its activations are set.
    It then runs through the quantized layer. The forward passes of the float model stop here, too, so that
    their inputs can be compared, but they run through the float layer.

    Args:
        name: Full name of the layer.
        number: Position of the layer among the layers of the block.
        layer: The float layer.
        quantized: The quantized layer, whose weight is not rounded yet.
        block_run: The forward passes through the block.

    Attributes:
        arrived: The input of each forward pass that has stopped here.
        is_done: Whether the layer is finished.
    """

    def __init__(self, name: str, number: int, layer: nn.Module, quantized: QuantizedLayer, block_run: BlockRun) -> None:
        self.name = name
        self.number = number
        self.layer = layer
        self.quantized = quantized
        self.arrived: dict[Forward, Tensor] = {}
        self.is_done = False
        self._block_run = block_run
        self._expected: dict[Forward, Tensor] | None = None
        self._outputs: dict[Forward, Tensor] = {}
        self._plain: Any = layer.forward
        self._float_weight = quantized.weight
        self._codes = None if quantized.weight_quantizer is None else quantized.weight_quantizer.codes
        self._width: int = quantized.weight.shape[0]  # type: ignore[index,assignment]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer in place of the layer's own ``forward`` method."""
        forward = current_forward()
        if forward is None:
            return self._plain(x, *args, **kwargs)
        if self.is_done and self._expected is not None and self._expected.pop(forward, x) is not x:
            self.reopen()
        if not self.is_done:
            experts: PooledExperts | None = forward.rehearsal
            if experts is not None and experts.looks_at(self.name, x):
                # This is a rehearsal, which needs only the input. The output is discarded.
                return x.new_zeros(*x.shape[:-1], self._width)
            self.arrived[forward] = x
            self._block_run.stop(self)
        # The method of the class is called, because the attributes of the quantized layer were copied from
        # the float layer, and other code may have wrapped the `forward` method there.
        if not forward.is_float:
            return QuantizedLayer.forward(self.quantized, x, *args, **kwargs)
        output = self._outputs.pop(forward, None)
        return self._plain(x, *args, **kwargs) if output is None else output

    @torch.no_grad()
    def float_output(self, forward: Forward) -> Tensor:
        """Return the float layer's output, without bias, for a waiting forward pass of the float model.

        The forward pass does not compute the output again when it continues.
        """
        output = self._outputs[forward] = self._plain(self.arrived[forward])
        bias = getattr(self.layer, "bias", None)
        return output if bias is None else output - bias

    def done(self, expected: Mapping[Forward, Tensor] | None = None) -> None:
        """Mark the layer as finished.

        For each forward pass that has not reached the layer yet, ``expected`` has the input that the rounding
        has assumed.
        """
        self.is_done = True
        self.arrived = {}
        self._expected = None if expected is None else dict(expected)

    def reopen(self) -> None:
        """Restore the float weight, so that the layer can be rounded again.

        If the layer had codes when the model was loaded, these codes are restored too.

        This is needed if a forward pass reaches the layer with another input than expected.
        """
        self.quantized.weight = self._float_weight
        if self.quantized.weight_quantizer is not None:
            self.quantized.weight_quantizer.codes = self._codes
        self.is_done, self._expected = False, None


def tokens_of(x: Tensor, call: Call, *, held_out: bool | None = None) -> Tensor:
    """Return the tokens of an input as a tensor ``[n, K]``. ``held_out`` chooses which tokens are returned.

    Args:
        x: Input in a forward pass of ``call``, ``[batch, tokens, K]`` or ``[batch · tokens, K]``. Its tokens
            may not match the mask of the call, for example if they were routed to an expert. In that case,
            all of them are treated as held out if the whole call is held out. Otherwise, no token is treated
            as held out.
        call: The call. Its mask tells which tokens are held out.
        held_out: True to return only the held-out tokens, False to return only the other tokens, None to
            return all.
    """
    flat = x.reshape(-1, x.shape[-1])
    if held_out is None:
        return flat
    if call.held_out is None or bool(call.held_out.all()):
        return flat if held_out == (call.held_out is not None) else flat[:0]
    mask = _laid_out(call.held_out if held_out else ~call.held_out, x.shape[:-1])
    if mask is None:
        return flat[:0] if held_out else flat
    rows = mask.nonzero().squeeze(1)  # computed on the host, where the mask is, so it need not wait for a device
    return flat.index_select(0, rows.to(flat.device, non_blocking=True))


def _laid_out(mask: Tensor, shape: torch.Size) -> Tensor | None:
    """Expand a mask ``[batch, tokens]`` or ``[batch, 1]`` to one value per token of a tensor.

    Return None if the mask and the tensor do not fit together.

    Args:
        mask: The mask.
        shape: Shape of the tensor without its last axis.
    """
    if len(shape) < 2:
        return mask.reshape(-1) if mask.numel() == shape.numel() else None
    if mask.shape[0] != shape[0] or mask.shape[1] not in (1, shape[1]):
        return None
    return mask.reshape(*mask.shape, *[1] * (len(shape) - 2)).expand(shape).reshape(-1)


class PooledExperts:
    """The pause point of a module that calls experts. It replaces the module's ``forward`` method.

    Args:
        layers: Full names of the experts' layers whose inputs share scales.
        name: Full name of the module.
        number: Position among the pause points of the block. It is greater than the positions of all layers
            that the module calls.
        scales: Scales of the block's activations.
        block_run: The forward passes through the block.
    """

    def __init__(self, layers: Iterable[str], name: str, number: float, scales: ActivationScales, block_run: BlockRun) -> None:
        self.name = name
        self.number = number
        self._layers = frozenset(layers)
        self._scales = scales
        self._block_run = block_run
        self._first: dict[Forward, dict[str, Tensor]] = {}
        self._seen: set[Key] = set()
        self._is_known = False

    def passed(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module.

        As long as the shared scales are not known, the forward pass rehearses the module and then pauses.
        """
        forward = current_forward()
        if forward is not None and not forward.is_float:
            while not self._is_known:
                forward.rehearsal, self._first[forward] = self, {}
                plain(*args, **kwargs)
                forward.rehearsal = None
                self._block_run.stop(self)
        return plain(*args, **kwargs)

    def looks_at(self, layer: str, x: Tensor) -> bool:
        """Return whether the output of a layer is not needed in the current rehearsal.

        If the shared scale of the layer's input is not known yet, the input ``x`` is observed.
        """
        forward = current_forward()
        assert forward is not None
        first = self._first[forward]
        if layer not in self._layers or not self._scales.wants(layer, INPUT):
            # This layer is not observed. It can be rounded now unless it depends on a layer that the
            # rehearsal skips.
            return bool(first) if layer not in self._layers else self._scales.experts.expert(layer) in first
        if first.setdefault(self._scales.experts.expert(layer), x) is x:
            self._scales.see(layer, INPUT, x)
            self._seen.add((layer, INPUT))
        return True

    def set_scales(self) -> None:
        """Set the scales of the observed inputs.

        All forward passes of all ranks must have rehearsed the module before this call.
        """
        seen = sorted({key for keys in self._block_run.grid.ranks.gather(self._seen) for key in keys})
        self._scales.set_scales(seen)
        self._is_known = not seen or not any(self._scales.wants(layer, INPUT) for layer in self._layers)
        self._seen = set()
        self._first = {}


def pooled_experts(
    block: Block, names: Iterable[str], scales: ActivationScales, block_run: BlockRun
) -> Iterator[tuple[nn.Module, PooledExperts]]:
    """Yield pairs: a module of the block that calls experts whose inputs share scales, and its pause point.

    Args:
        block: The block. Forward passes wait at its entry.
        names: Full names of the block's layers, in order.
        scales: Scales of the block's activations.
        block_run: The forward passes through the block.
    """
    ordered = {name: number for number, name in enumerate(names)}
    layers_of: dict[str, list[str]] = {}
    for name in ordered:
        projection = scales.experts.projection(name)
        if projection is not None and len(scales.pool_of(name)) > 1:
            layers_of.setdefault(_caller(block, projection.partition(".*.")[0]), []).append(name)
    for caller, layers in layers_of.items():
        number = _behind(ordered, block, caller)
        yield block.module.get_submodule(caller), PooledExperts(layers, block.prefix + caller, number, scales, block_run)


def _caller(block: Block, experts: str) -> str:
    """Return the name of the module that calls the experts, relative to the block.

    The module is the parent of the experts, or the parent's parent if the parent is a list or a dictionary.

    Args:
        block: The block.
        experts: Full name of the experts' parent.
    """
    inside = experts.removeprefix(block.prefix)
    holder = block.module.get_submodule(inside)
    return inside.rpartition(".")[0] if isinstance(holder, nn.ModuleList | nn.ModuleDict) else inside


def _behind(ordered: Mapping[str, int], block: Block, caller: str) -> float:
    """Return a position that is greater than the positions of all layers of the module ``caller``."""
    prefix = ".".join(part for part in (block.name, caller) if part)
    return max(number for name, number in ordered.items() if not prefix or name.startswith(f"{prefix}.")) + 0.5
