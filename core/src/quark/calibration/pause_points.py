"""PausePoint: stands in for a layer while its block is worked on, so that forwards wait where a weight is still to be rounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quark.calibration.batches import Call
from quark.calibration.expert_pools import PooledExperts
from quark.calibration.lockstep import BlockRun, Forward, current_forward
from quark.modules import QuantizedLayer


class PausePoint:
    """Stands in for one layer: a forward stops here until the layer is finished, its weight rounded and the scales of its activations set.

    It then passes through the finished layer, quantizers of input and output and all.

    Forwards of the float model stop too, where their input is wanted, and pass through the float layer.

    Args:
        name: Full name of the layer.
        number: Its place among the layers of the block.
        layer: The float layer.
        quantized: The quantized one, its weight not yet rounded.
        block_run: The forwards that come here.

    Attributes:
        arrived: What each forward that stopped here brought, or was expected to bring.
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
        self._width: int = quantized.weight.shape[0]  # type: ignore[index,assignment]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the layer's forward."""
        forward = current_forward()
        if forward is None:
            found: Tensor = self._plain(x, *args, **kwargs)
            return found
        if self.is_done and self._expected is not None and self._expected.pop(forward, x) is not x:
            self._reopen()
        if not self.is_done:
            experts: PooledExperts | None = forward.rehearsal
            if experts is not None and experts.looks_at(self.name, x):
                # What comes of it is thrown away: only the input was wanted.
                return x.new_zeros(*x.shape[:-1], self._width)
            self.arrived[forward] = x
            self._block_run.stop(self)
        # By the class: others may have wrapped the layer that it was made from, and what they did was copied with it.
        found = self._plain(x, *args, **kwargs) if forward.is_float else QuantizedLayer.forward(self.quantized, x, *args, **kwargs)
        return found

    def done(self, expected: Mapping[Forward, Tensor] | None = None) -> None:
        """The layer is finished; ``expected`` are the inputs it was finished for, where forwards have not brought them here yet."""
        self.is_done = True
        self.arrived = {}
        self._expected = None if expected is None else dict(expected)

    def _reopen(self) -> None:
        """Another input came than was expected: the layer is to be rounded anew."""
        self.quantized.weight = self._float_weight
        self.is_done, self._expected = False, None


def tokens_of(x: Tensor, call: Call, *, held_out: bool | None = None) -> Tensor:
    """Return the tokens of ``x [batch, tokens, K]`` or ``[batch · tokens, K]`` as ``[n, K]``, without padding.

    Args:
        x: Of a forward of that call. Where its tokens have another arrangement, such as those routed to an expert, all of them count as
            held out if all of the call is, and none otherwise.
        call: Its ``attention_mask [batch, tokens]`` says what is padding.
        held_out: True for the tokens alone that are held out, False for the others, None for both.
    """
    flat = x.reshape(-1, x.shape[-1])
    wanted = _wanted(call, held_out)
    if wanted is None:
        return flat
    places = _laid_out(wanted, x.shape[:-1])
    if places is not None:
        return flat if bool(places.all()) else flat[places.to(flat.device)]
    is_held_out = call.held_out is not None and not bool(_wanted(call, False).any())  # type: ignore[union-attr]
    return flat if held_out in (None, is_held_out) else flat[:0]


def number_of_tokens(x: Tensor, call: Call) -> int:
    """Return how many tokens `tokens_of` gives of ``x``."""
    wanted = _wanted(call, None)
    places = None if wanted is None else _laid_out(wanted, x.shape[:-1])
    return x.numel() // x.shape[-1] if places is None else int(places.sum())


def _wanted(call: Call, held_out: bool | None) -> Tensor | None:
    """The tokens that `tokens_of` is asked for, ``[batch, tokens]`` or ``[batch, 1]``, bool, on the CPU; None where they are all."""
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
    """A mask ``[batch, tokens]`` or ``[batch, 1]`` for each vector of a tensor of that shape; None where the two do not fit."""
    if len(shape) < 2:
        return mask.reshape(-1) if mask.numel() == shape.numel() else None
    if mask.shape[0] != shape[0] or mask.shape[1] not in (1, shape[1]):
        return None
    return mask.reshape(*mask.shape, *[1] * (len(shape) - 2)).expand(shape).reshape(-1)
