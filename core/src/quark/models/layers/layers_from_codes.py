"""Classes for layers that run from codes. Such a layer is a quantized layer of any type whose weight stays
packed in memory.

The quantized class of the layer type computes the output. When its code reads the weight, the stored tensors
are dequantized into a buffer that all layers share. So the layer types and number formats of plugins need no
additional code.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from quark.models.layers.coded_layer import restored_parameter
from quark.models.layers.packed_weight import PackedWeight, weight_room
from quark.models.layers.quantized_layers import QuantEmbedding, QuantizedLayer, copied

ROOM_ELEMENTS = 1 << 21
"""Maximum number of elements of a weight that a linear layer on a CPU unpacks as a whole. A larger weight is
unpacked and multiplied in slices of this size, because a slice stays in the third-level cache. Devices other
than CPUs use eight times this number, because they have larger caches and start each operation more slowly.
"""
_ROWS = 64
"""The number of rows of a slice is a multiple of this number. Matrix products add an incomplete last vector
of rows in another order. With this multiple, the product of a slice equals the same rows of the whole product
bit for bit."""

_LOCAL = threading.local()
_BECOMING = threading.RLock()
_PREFIX = "packed_"


class Packed(nn.Module, ABC):
    """The base class of modules that have tensors in the form in which a checkpoint stores them.

    While a checkpoint is loaded, such modules replace the layers of the model, and the loader fills their
    tensors.
    """

    @abstractmethod
    def unpack(self) -> nn.Module:
        """Return the module that replaces this one after loading, on the device of this module's tensors.

        Raises:
            CheckpointError: The loaded tensors cannot be used.
        """

    def from_codes(self) -> nn.Module:
        """Return a module that computes the same as the result of `unpack`, but whose weight stays packed.

        The default implementation returns the result of `unpack`.
        """
        return self.unpack()


class WeightFromCodes(Tensor):
    """The weight of a layer that runs from codes, as a parameter without gradient.

    The tensor has the shape, dtype and device of the dequantized weight, but no data of its own. Each
    operation on the tensor dequantizes the weight again. If an operation changes the weight in place, the
    layer becomes a quantized layer whose weight is dequantized and in memory.

    Args:
        layer: The layer that the weight belongs to.
    """

    _layer: RunsFromCodes
    _is_param = True  # torch recognizes parameters by this attribute
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, layer: RunsFromCodes) -> Self:
        packed = layer.packed_weight
        weight: Self = cls._make_wrapper_subclass(cls, packed.shape, dtype=packed.dtype, device=packed.device)
        weight._layer = layer
        return weight

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aliases = (argument.alias_info for argument in operation._schema.arguments)
        for tensor, alias in zip(args, aliases, strict=False):
            if isinstance(tensor, cls) and alias is not None and alias.is_write:
                tensor._layer.become_unpacked()
        args, kwargs = tree_map_only(cls, cls.values, (args, kwargs or {}))
        return operation(*args, **kwargs)

    def values(self) -> Tensor:
        """Dequantize the weight into newly allocated memory, and return it.

        If the layer no longer runs from codes, return the weight of the layer itself.
        """
        layer: Any = self._layer
        return layer.packed_weight.values() if isinstance(layer, RunsFromCodes) else layer.weight

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return nn.Parameter(self.values(), requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__(None).__reduce_ex__(protocol)


class RunsFromCodes(Packed):
    """A quantized layer whose weight is a `PackedWeight`.

    The class of such a layer derives from this class and from a quantized class. The parameter ``weight`` is
    a `WeightFromCodes`. The state dict contains the stored tensors in place of the weight, so that loading
    the state dict restores the same codes. Inputs and outputs are quantized as in any quantized layer. If the
    layer is cast to another dtype, the dequantized weight gets the new dtype, but the stored tensors keep
    their dtypes.
    """

    _weight: PackedWeight
    """The weight with meta tensors. The stored tensors themselves are buffers of this module."""
    _shows_weight = True

    @property
    def packed_weight(self) -> PackedWeight:
        """The weight with its stored tensors, on the device of this module."""
        made = self._weight
        tensors = {name: self._buffers[_PREFIX + name] for name in made.tensors}
        return PackedWeight(made.packing, tensors, made.shape, made.dtype, made.name)  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:
        """The weight of the layer.

        While this layer computes its output, the weight is a dequantized tensor. At other times, it is a
        `WeightFromCodes`.
        """
        layer, values = getattr(_LOCAL, "computing", (None, None))
        return values if layer is self and values is not None else WeightFromCodes(self)

    @property
    def _parameters(self) -> Any:  # type: ignore[override]
        """A dictionary from name to parameter. It includes the weight, but an assignment can only change the
        other parameters of the module."""
        own = self.__dict__["_parameters"]
        return ChainMap(own, {"weight": self.weight}) if self._shows_weight else own

    def register_parameter(self, name: str, param: Any) -> None:
        """Set the parameter ``name`` to ``param``.

        If ``name`` is ``"weight"`` and ``param`` is the weight of another layer that runs from codes, both
        layers then share the stored tensors. With any other new weight, this layer no longer runs from codes.
        """
        if name == "weight" and isinstance(param, WeightFromCodes):
            made = param._layer._weight
            own = {n: t for n, t in self._buffers.items() if n.removeprefix(_PREFIX) not in self._weight.tensors}
            tied = {_PREFIX + n: param._layer._buffers[_PREFIX + n] for n in made.tensors}
            self.__dict__ |= {"_weight": made, "_buffers": own | tied}
        elif name == "weight":
            self.become_unpacked().register_parameter(name, param)
        else:
            super().register_parameter(name, param)

    def held_codes(self) -> Tensor:
        """Return the stored tensor that contains the codes of the weight."""
        return self._buffers[_PREFIX + next(iter(self._weight.tensors))]  # type: ignore[return-value]

    @contextmanager
    def _own_tensors(self) -> Iterator[None]:
        """Inside the ``with`` block, ``_parameters`` of this module does not contain the weight."""
        self.__dict__["_shows_weight"] = False
        try:
            yield
        finally:
            del self.__dict__["_shows_weight"]

    def product(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer without output quantization."""
        packed, computes = self.packed_weight, self._float_forward
        quantized: Any = super()
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            return quantized.product(x, *args, **kwargs)  # the gradient needs the weight later
        if issubclass(type(self), QuantEmbedding) and computes is not None and getattr(self, "max_norm", None) is None:
            rows = packed.looked_up(x)
            if computes is nn.Embedding.forward:
                return rows
            # The float class multiplies the rows by a constant, so its forward computes on the rows that were
            # looked up.
            return self._computed(rows.reshape(-1, rows.shape[-1]), torch.arange(x.numel()).to(x).view(x.shape))
        room = ROOM_ELEMENTS if packed.device.type == "cpu" else 8 * ROOM_ELEMENTS
        parts = packed.row_slices(room, _ROWS) if computes is nn.Linear.forward and packed.shape[0] else []
        if len(parts) > 1:
            return self._linear_in_parts(packed, parts, x)
        return self._computed(packed.values(weight_room(packed.shape, packed.dtype, packed.device)), x, *args, **kwargs)

    def _computed(self, values: Tensor, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``product`` of the quantized class with ``values`` as the weight, and return the result."""
        quantized: Any = super()
        _LOCAL.computing = (self, values)
        try:
            return quantized.product(x, *args, **kwargs)
        finally:
            _LOCAL.computing = (None, None)

    @property
    def _float_forward(self) -> Any:
        """The ``forward`` of the float class, or None if the quantized class overrides ``product``."""
        own: Any = super()
        if own.product.__func__ is not QuantizedLayer.product:
            return None
        return super(QuantizedLayer, self).forward.__func__  # type: ignore[misc]

    def _linear_in_parts(self, packed: PackedWeight, parts: list[slice], x: Tensor) -> Tensor:
        """Return the output of a linear layer without output quantization.

        Each item of ``parts`` is a slice of the output channels. The method unpacks the weight of one slice
        at a time.
        """
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
        """Return a quantized layer whose weight is dequantized and in memory.

        The returned layer has the device and the dtype of this layer.
        """
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

    def become_unpacked(self) -> QuantizedLayer:
        """Change this module, in place, into the result of `unpack`. Return this module."""
        with _BECOMING:
            if isinstance(self, RunsFromCodes):  # False if another thread has just unpacked this layer
                layer = self.unpack()
                self.__class__ = type(layer)  # type: ignore[assignment]
                object.__setattr__(self, "__dict__", layer.__dict__)
        return self  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        # The class of this layer is created on demand, so no module exports it.
        return _bare, type(self).__bases__, self.__dict__

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._own_tensors():
            nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)  # codes are already in their stored form

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._own_tensors():
            super()._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # A cast applies to the values: casting codes or scales would change them.
        stored = {_PREFIX + name: self._buffers.pop(_PREFIX + name) for name in self._weight.tensors}
        with self._own_tensors():
            super()._apply(fn, recurse)
        made, probe = self._weight, torch.empty(0, dtype=self._weight.dtype)
        device = fn(torch.empty(0, dtype=torch.uint8, device=next(t.device for t in stored.values() if t is not None))).device
        self._buffers.update({name: None if tensor is None else tensor.to(device) for name, tensor in stored.items()})
        self._weight = PackedWeight(made.packing, made.tensors, made.shape, fn(probe).dtype, made.name)
        return self


class UntilUsed(RunsFromCodes):
    """A quantized layer whose weight stays packed until the layer is called or its weight is read.

    The object then becomes, in place, a quantized layer whose weight is dequantized and in memory.
    """

    @property
    def weight(self) -> Tensor:
        """The dequantized weight. The first access to this attribute unpacks the layer."""
        return self.become_unpacked().weight  # type: ignore[return-value]

    @property
    def _parameters(self) -> Any:  # type: ignore[override]
        return self.become_unpacked()._parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Unpack this layer and return its output."""
        return self.become_unpacked().forward(*args, **kwargs)

    def from_codes(self) -> nn.Module:
        """Return a layer that shares the stored tensors of this layer, and that stays packed when it is
        called."""
        return copied(self, _class_from_codes(RunsFromCodes, type(self).__bases__[1]))

    def _apply(self, *args: Any) -> nn.Module:
        return self.become_unpacked()._apply(*args)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.become_unpacked()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.become_unpacked()._load_from_state_dict(*args)


def until_used(layer: nn.Module) -> nn.Module:
    """Return an `UntilUsed` with the tensors of ``layer`` if that layer runs from codes.

    Return any other layer unchanged.
    """
    return copied(layer, _class_from_codes(UntilUsed, type(layer).__bases__[1])) if isinstance(layer, RunsFromCodes) else layer


def runs_from_codes(quantized: QuantizedLayer, weight: PackedWeight) -> QuantizedLayer:
    """Return a quantized layer that runs from codes.

    Args:
        quantized: A quantized layer whose bias, other parameters and activation scales are set. Its weight is
            not used.
        weight: The weight of the returned layer.

    Raises:
        CheckpointError: A scale is not valid.
    """
    weight.check()
    layer: Any = copied(quantized, _class_from_codes(RunsFromCodes, type(quantized)))  # type: ignore[arg-type]  # classes are hashed by identity
    layer.__dict__["_parameters"].pop("weight", None)
    layer._buffers |= {_PREFIX + name: tensor for name, tensor in weight.tensors.items()}
    # Only the buffers refer to the tensors. A second reference would keep the old tensors in memory after the
    # layer is moved.
    shapes = {name: tensor.to("meta") for name, tensor in weight.tensors.items()}
    layer._weight = PackedWeight(weight.packing, shapes, weight.shape, weight.dtype, weight.name)
    return layer


def _bare(*bases: type[nn.Module]) -> Any:
    """Return an instance without attributes. Its class is the one that derives from ``bases``."""
    kind: Any = _class_from_codes(*bases)  # type: ignore[arg-type]  # classes are hashed by identity
    return kind.__new__(kind)


@lru_cache(maxsize=1024)
def _class_from_codes(kind: type[RunsFromCodes], quantized: type[QuantizedLayer]) -> type[QuantizedLayer]:
    """Return a class that derives from ``kind`` and ``quantized``.

    The function caches the classes, so two calls with the same arguments return the same class.
    """
    name = f"{quantized.__name__}{'FromCodes' if kind is RunsFromCodes else kind.__name__}"
    members: dict[str, Any] = {"__doc__": kind.__doc__}
    if kind is RunsFromCodes:
        members["forward"] = torch.compiler.disable(quantized.forward)  # torch cannot trace how a weight is unpacked
    return type(name, (kind, quantized), members)
