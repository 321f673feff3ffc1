"""PausePoint: the forward of a layer while its block is calibrated.

It waits where the layer's weight is still to be rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quark.calibration.batches import Call
from quark.calibration.expert_pools import PooledExperts
from quark.calibration.forwards import Forward, current_forward
from quark.calibration.lockstep import BlockRun
from quark.models.layers import QuantizedLayer

__all__ = ["PausePoint", "number_of_tokens", "tokens_of"]


class PausePoint:
    """Stands in for one layer.

    A forward stops here until the layer's weight is rounded and the scales of its activations are set.

    The forward then passes through the finished layer with its quantizers. Forwards of the float model stop
    too, so that their inputs can be compared, and pass through the float layer.

    Args:
        name: Full name of the layer.
        number: Its position among the layers of the block.
        layer: The float layer.
        quantized: The quantized one, its weight not yet rounded.
        block_run: The forwards that come here.

    Attributes:
        arrived: The input of each forward that has stopped here.
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
        self._plain: Any = layer.forward
        self._float_weight = quantized.weight
        self._codes = None if quantized.weight_quantizer is None else quantized.weight_quantizer.codes
        self._width: int = quantized.weight.shape[0]  # type: ignore[index,assignment]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Stand in for the layer's forward."""
        forward = current_forward()
        if forward is None:
            return self._plain(x, *args, **kwargs)
        if self.is_done and self._expected is not None and self._expected.pop(forward, x) is not x:
            self.reopen()
        if not self.is_done:
            experts: PooledExperts | None = forward.rehearsal
            if experts is not None and experts.looks_at(self.name, x):
                # A rehearsal: only the input counts, and the output is thrown away.
                return x.new_zeros(*x.shape[:-1], self._width)
            self.arrived[forward] = x
            self._block_run.stop(self)
        # By the class: others may have wrapped the layer that it was made from, and what they did was copied
        # with it.
        return self._plain(x, *args, **kwargs) if forward.is_float else QuantizedLayer.forward(self.quantized, x, *args, **kwargs)

    def done(self, expected: Mapping[Forward, Tensor] | None = None) -> None:
        """Mark the layer as finished.

        ``expected`` are the inputs it was rounded for, where forwards have not brought them here yet.
        """
        self.is_done = True
        self.arrived = {}
        self._expected = None if expected is None else dict(expected)

    def reopen(self) -> None:
        """Take back the float weight, and the codes of a layer that came with them.

        Another input came than was expected, and the layer is to be rounded for that one.
        """
        self.quantized.weight = self._float_weight
        if self.quantized.weight_quantizer is not None:
            self.quantized.weight_quantizer.codes = self._codes
        self.is_done, self._expected = False, None


def tokens_of(x: Tensor, call: Call, *, held_out: bool | None = None) -> Tensor:
    """Return the tokens of an input as ``[n, K]``, without padding.

    The input is ``x [batch, tokens, K]`` or ``[batch · tokens, K]``.

    Args:
        x: Of a forward of that call. Where its tokens have another arrangement, such as those routed to an
            expert, all of them count as held out if all of the call is, and none otherwise.
        call: Its ``attention_mask [batch, tokens]`` says what is padding.
        held_out: True for the tokens alone that are held out, False for the others, None for both.
    """
    flat = x.reshape(-1, x.shape[-1])
    chosen = _chosen(call, held_out)
    if chosen is None:
        return flat
    mask = _laid_out(chosen, x.shape[:-1])
    if mask is not None:
        if bool(mask.all()):
            return flat
        rows = mask.nonzero().squeeze(1)  # on the host, which has the mask: a device would have to be asked how many there are
        return flat.index_select(0, rows.to(flat.device, non_blocking=True))
    is_held_out = call.held_out is not None and not bool(_chosen(call, False).any())  # type: ignore[union-attr]
    return flat if held_out in (None, is_held_out) else flat[:0]


def number_of_tokens(x: Tensor, call: Call) -> int:
    """Return how many tokens `tokens_of` gives of ``x``."""
    chosen = _chosen(call, None)
    mask = None if chosen is None else _laid_out(chosen, x.shape[:-1])
    return x.numel() // x.shape[-1] if mask is None else int(mask.sum())


def _chosen(call: Call, held_out: bool | None) -> Tensor | None:
    """Return the tokens that `tokens_of` is asked for, bool, on the CPU.

    ``[batch, tokens]`` or ``[batch, 1]``; None where they are all.
    """
    mask = call.kwargs.get("attention_mask")
    is_token = mask.cpu() != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None
    if held_out is None:
        return is_token
    if call.held_out is None:
        return torch.zeros(1, 1, dtype=torch.bool) if held_out else is_token
    if held_out:
        return call.held_out
    return ~call.held_out if is_token is None else is_token & ~call.held_out


def _laid_out(mask: Tensor, shape: torch.Size) -> Tensor | None:
    """Return a mask ``[batch, tokens]`` or ``[batch, 1]`` for each vector of a tensor of that shape.

    None where the two do not fit.
    """
    if len(shape) < 2:
        return mask.reshape(-1) if mask.numel() == shape.numel() else None
    if mask.shape[0] != shape[0] or mask.shape[1] not in (1, shape[1]):
        return None
    return mask.reshape(*mask.shape, *[1] * (len(shape) - 2)).expand(shape).reshape(-1)
