"""Stations: in place of each layer's forward while its block is worked on, so that forwards stop where a weight is still to be rounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quark.nn import QuantizedLayer
from quark.pipeline.batches import Call
from quark.pipeline.expert_pools import PooledExperts
from quark.pipeline.lockstep import Forward, LockStep, current_forward


class Station:
    """Stands in for one layer: a forward stops here until the layer is finished, its weight rounded and the scales of its activations set.

    It then passes through the finished layer, quantizers of input and output and all.

    Forwards of the float model stop too, where their input is wanted, and pass through the float layer.

    Args:
        name: Full name of the layer.
        number: Its place among the layers of the block.
        layer: The float layer.
        made: The quantized one, its weight not yet rounded.
        run: Whose forwards come here.

    Attributes:
        arrived: What each forward that stopped here brought, or was foreseen to bring.
        is_done: Whether the layer is finished.
    """

    def __init__(self, name: str, number: int, layer: nn.Module, made: QuantizedLayer, run: LockStep) -> None:
        self.name = name
        self.number = number
        self.layer = layer
        self.made = made
        self.arrived: dict[Forward, Tensor] = {}
        self.is_done = False
        self._run = run
        self._foreseen: dict[Forward, Tensor] | None = None
        self._plain: Any = layer.forward
        self._float_weight = made.weight
        self._width: int = made.weight.shape[0]  # type: ignore[index,assignment]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the layer's forward."""
        forward = current_forward()
        if forward is None:
            found: Tensor = self._plain(x, *args, **kwargs)
            return found
        if self.is_done and self._foreseen is not None and self._foreseen.pop(forward, x) is not x:
            self._reopen()
        if not self.is_done:
            experts: PooledExperts | None = forward.rehearsal
            if experts is not None and experts.looks_at(self.name, x):
                # What comes of it is thrown away: only the input was wanted.
                return x.new_zeros(*x.shape[:-1], self._width)
            self.arrived[forward] = x
            self._run.stop(self)
        # By the class: others may have wrapped the layer that it was made from, and what they did was copied with it.
        found = self._plain(x, *args, **kwargs) if forward.is_float else QuantizedLayer.forward(self.made, x, *args, **kwargs)
        return found

    def done(self, foreseen: Mapping[Forward, Tensor] | None = None) -> None:
        """The layer is finished; ``foreseen`` are the inputs it was finished for, where forwards have not brought them here yet."""
        self.is_done = True
        self.arrived = {}
        self._foreseen = None if foreseen is None else dict(foreseen)

    def _reopen(self) -> None:
        """Another input came than was foreseen: the layer is to be rounded anew."""
        self.made.weight = self._float_weight
        self.is_done, self._foreseen = False, None


def tokens_of(x: Tensor, call: Call) -> Tensor:
    """``x`` as ``[tokens, K]``, without those that the call's ``attention_mask [batch, tokens]`` leaves out."""
    mask = call.kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and x.ndim == 3 and mask.shape == x.shape[:2] and not bool(mask.all()):
        return x[mask.to(device=x.device, dtype=torch.bool)]
    return x.reshape(-1, x.shape[-1])
