"""Layers that run from codes: quantized layers of any type whose weight stays packed.

The quantized class of the layer type computes as ever; when it asks for its weight, it gets the values that
are in the stored tensors, in memory that all layers share. So a layer type or a number format of a plugin
needs no code of its own for it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quark.models.layers.coded_layer import restored_parameter
from quark.models.layers.packed_weight import PackedWeight, weight_room
from quark.models.layers.quantized_layers import QuantizedLayer, copied

__all__ = ["ROOM_ELEMENTS", "Packed", "RunsFromCodes", "runs_from_codes"]

ROOM_ELEMENTS = 1 << 21
"""Elements of a weight up to which a linear layer unpacks it whole; a larger one takes its outputs in slices
of that size, which stay in a third-level cache. On other devices it is eight times that: their caches, and
the cost of an operation, are larger.
"""
_ROWS = 64
"""Divides the rows of a slice. Products compute their last rows, if there are fewer than they have lanes, in
another order: a slice then equals the rows of the whole product to the bit.
"""

_LOCAL = threading.local()
_PREFIX = "packed_"


class Packed(nn.Module, ABC):
    """Base of modules that hold the tensors of a checkpoint as they are stored.

    While a checkpoint is loaded they stand in for other modules: loaders fill their tensors.
    """

    @abstractmethod
    def unpack(self) -> nn.Module:
        """Return the module that replaces this one, on the device of its tensors.

        Raises:
            CheckpointError: The tensors cannot be used.
        """

    def from_codes(self) -> nn.Module:
        """Return the module that computes the same and keeps the weight as it is stored.

        By default, or where nothing is to be gained by that, `unpack`.
        """
        return self.unpack()


class RunsFromCodes(Packed):
    """A quantized layer, whose class it derives from as well, with a `PackedWeight`.

    ``weight`` is computed anew whenever it is read. Inputs and outputs are quantized as by any quantized
    layer. Moving or casting it changes the dtype of the values, and never the stored tensors.
    """

    _weight: PackedWeight
    """As it was made; the tensors are this module's buffers, on its device."""

    @property
    def packed_weight(self) -> PackedWeight:
        """The weight as it is stored."""
        made = self._weight
        tensors = {name: self._buffers[_PREFIX + name] for name in made.tensors}
        return PackedWeight(made.packing, tensors, made.shape, made.dtype, made.name)  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:
        """The values of the weight: those at hand while this layer computes, else in fresh memory."""
        layer, values = getattr(_LOCAL, "computing", (None, None))
        return values if layer is self and values is not None else self.packed_weight.values()

    def product(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output before the output quantizer."""
        packed, computes = self.packed_weight, self._float_forward
        quantized: Any = super()
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            return quantized.product(x, *args, **kwargs)  # the gradient needs the weight later
        if computes is nn.Embedding.forward and getattr(self, "max_norm", None) is None:
            return packed.looked_up(x)
        room = ROOM_ELEMENTS if packed.device.type == "cpu" else 8 * ROOM_ELEMENTS
        parts = packed.row_slices(room, _ROWS) if computes is nn.Linear.forward and packed.shape[0] else []
        if len(parts) > 1:
            return self._linear_in_parts(packed, parts, x)
        values = packed.values(weight_room(packed.shape, packed.dtype, packed.device))
        _LOCAL.computing = (self, values)
        try:
            return quantized.product(x, *args, **kwargs)
        finally:
            _LOCAL.computing = (None, None)

    @property
    def _float_forward(self) -> Any:
        """The forward of the float class; None where the quantized class has a product of its own."""
        own: Any = super()
        if own.product.__func__ is not QuantizedLayer.product:
            return None
        return super(QuantizedLayer, self).forward.__func__  # type: ignore[misc]

    def _linear_in_parts(self, packed: PackedWeight, parts: list[slice], x: Tensor) -> Tensor:
        """Return the product of a linear layer, some output channels at a time."""
        quantizer, bias = self.input_quantizer, self.bias
        x = x if quantizer is None else quantizer(x)  # type: ignore[operator]
        output: Tensor | None = None
        for rows in parts:
            part = packed.part(rows)
            values = part.values(weight_room(part.shape, part.dtype, part.device))
            y = functional.linear(x, values, None if bias is None else bias[rows])  # type: ignore[index]
            output = y.new_empty(*y.shape[:-1], packed.shape[0]) if output is None else output
            output[..., rows] = y
        assert output is not None
        return output

    @torch.no_grad()
    def unpack(self) -> nn.Module:
        """Return the quantized layer with its weight in memory, as this one has been moved and cast."""
        packed = self.packed_weight
        quantized: Any = copied(self, type(self).__bases__[1])
        for name in packed.tensors:
            del quantized._buffers[_PREFIX + name]
        del quantized.__dict__["_weight"]
        quantized._parameters["weight"] = restored_parameter(quantized.weight_quantizer, *packed.codes(), packed.dtype)
        return quantized

    def from_codes(self) -> nn.Module:
        """Return this module."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Its class is made when it is wanted: there is no place from which it could be imported.
        return _bare, (type(self).__bases__[1],), self.__dict__

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)  # codes are as they are stored already

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # A cast is one of the values: a cast of codes or scales would change them.
        stored = {_PREFIX + name: self._buffers.pop(_PREFIX + name) for name in self._weight.tensors}
        super()._apply(fn, recurse)
        made, probe = self._weight, torch.empty(0, dtype=self._weight.dtype)
        device = fn(torch.empty(0, dtype=torch.uint8, device=next(t.device for t in stored.values() if t is not None))).device
        self._buffers.update({name: None if tensor is None else tensor.to(device) for name, tensor in stored.items()})
        self._weight = PackedWeight(made.packing, made.tensors, made.shape, fn(probe).dtype, made.name)
        return self


def runs_from_codes(quantized: QuantizedLayer, weight: PackedWeight) -> QuantizedLayer:
    """Return a quantized layer that runs from codes.

    Args:
        quantized: With its other parameters, its scales of activations, and no weight of its own.
        weight: Its weight.

    Raises:
        CheckpointError: A scale is not valid.
    """
    weight.check()
    layer: Any = copied(quantized, _class_from_codes(type(quantized)))  # type: ignore[arg-type]  # classes are hashed by identity
    layer._parameters.pop("weight", None)
    layer._buffers |= {_PREFIX + name: tensor for name, tensor in weight.tensors.items()}
    # The tensors are the buffers: a second reference would keep those that are moved away.
    shapes = {name: tensor.to("meta") for name, tensor in weight.tensors.items()}
    layer._weight = PackedWeight(weight.packing, shapes, weight.shape, weight.dtype, weight.name)
    return layer


def _bare(quantized: type[QuantizedLayer]) -> Any:
    """Return a layer that runs from codes, without attributes."""
    kind: Any = _class_from_codes(quantized)  # type: ignore[arg-type]  # classes are hashed by identity
    return kind.__new__(kind)


@lru_cache(maxsize=1024)
def _class_from_codes(quantized: type[QuantizedLayer]) -> type[QuantizedLayer]:
    return type(f"{quantized.__name__}FromCodes", (RunsFromCodes, quantized), {"__doc__": RunsFromCodes.__doc__})
