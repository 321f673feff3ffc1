"""PackedLayer: a layer that holds the tensors of a checkpoint until its first forward.

`PackedLayer.unpack`, or the first forward, creates the quantized layer.

The tensors have the names that checkpoint loaders look for (``weight``, ``weight_quantizer.scale``, …). Their
shapes and dtypes come from packing meta tensors, so that they always agree with the packing code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from quark.config.layer import QLayerConfig, TensorSpec, levels
from quark.config.slot import ACTIVATIONS, PARAMETERS, Slot
from quark.errors import CheckpointError, ConfigError
from quark.models.layers.coded_layer import refuse_bad_scales
from quark.models.layers.layer_shape import LayerShape
from quark.models.layers.quantized_layers import QuantizedLayer, linear_weight, quantized_class
from quark.models.layers.quantizer_module import QuantizerModule
from quark.numbers import cast_finite
from quark.numbers.on_grid import LOSSY, codes_error
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.plugins.attribution import origin

__all__ = ["Packed", "PackedLayer", "PackedScales", "checked_codes", "packed_meta", "packed_scales", "stored_tensors", "without_weights"]


class Packed(nn.Module):
    """Base of modules that replace other modules while a checkpoint is loaded.

    Loaders fill their tensors, then `unpack` is called once.
    """

    def unpack(self) -> nn.Module:
        """Return the module that replaces this one, on the device of its tensors.

        Raises:
            CheckpointError: The tensors cannot be used.
        """
        raise NotImplementedError


class PackedScales(nn.Module):
    """The stored scales of one tensor, under their checkpoint suffixes: ``scale``, ``zero_point``, …

    Args:
        tensors: The tensors by suffix.
        spec: The quantization of the tensor.
    """

    def __init__(self, tensors: dict[str, Tensor], spec: TensorSpec | None) -> None:
        super().__init__()
        self._is_symmetric = all(level.symmetric is not False for level in levels(spec))
        for suffix, tensor in tensors.items():
            self.register_buffer(suffix, tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by suffix."""
        return dict(self._buffers)  # type: ignore[arg-type]

    def zero_points_of_symmetric_specs(self) -> Iterator[str]:
        """Yield the suffixes of tensors that a checkpoint may leave out, since all of their values are 0."""
        return (suffix for suffix in self._buffers if self._is_symmetric and suffix.startswith("zero_point"))


class PackedLayer(Packed):
    """A layer whose weight is packed codes, or the rounded values themselves.

    Args:
        layer: The float layer; its tensors may be on any device and are not used.
        config: The quantization of the layer.
        order: Order of 4-bit codes in a word.
        name: Full name of the layer in its model, for messages.
        holds_values: Whether the checkpoint has rounded values in place of codes; it has scales in both
            cases.
        is_beside_weight: Whether a stored scale with a given suffix is a buffer of this module
            (``weight_scale_2``), and not of a submodule (``weight_quantizer.scale_2``), because its loader
            looks for it there.
    """

    def __init__(
        self,
        layer: nn.Module,
        config: QLayerConfig,
        order: str,
        name: str = "a layer",
        holds_values: bool = False,
        is_beside_weight: Callable[[str], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        weight = linear_weight(layer)
        bias: Tensor | None = getattr(layer, "bias", None)
        self._float = (without_weights(layer),)  # in a tuple, so that its parameters are not this module's
        self.layer_config = config
        self.order = order
        self._name = name
        self._holds_values = holds_values
        self._is_beside_weight = is_beside_weight
        self.weight_shape, self.dtype = tuple(weight.shape), weight.dtype
        self._bias_shape = () if bias is None else tuple(bias.shape)  # packed codes do not determine the number of elements
        self._flat: dict[str, tuple[Slot, str]] = {}
        kind = quantized_class(layer)
        self._as_stored = kind.as_stored
        self._quantizer_of, self._shapes = kind.quantizer_of, LayerShape.of(layer)
        self._register(Slot.weight, config.weight, weight)
        self._register(Slot.bias, config.bias, bias)
        for slot in ACTIVATIONS:
            spec = getattr(config, slot)
            if spec is not None:
                self._register_scales(slot, spec)
        self._others = [n for n in (*layer._parameters, *layer._buffers) if n not in PARAMETERS]
        self._register_others(layer)
        self._ready: QuantizedLayer | None = None

    def _register_others(self, layer: nn.Module) -> None:
        """Register the layer's other tensors, as checkpoints hold them; its submodules are shared."""
        for name in self._others:
            if name in layer._parameters:
                tensor = layer._parameters[name]
                empty = None if tensor is None else nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
                self.register_parameter(name, empty)
            else:
                self.register_buffer(name, layer._buffers[name], persistent=name not in layer._non_persistent_buffers_set)
        for name, module in layer._modules.items():
            self.add_module(name, module)

    def _register(self, slot: Slot, spec: TensorSpec | None, tensor: Tensor | None) -> None:
        if tensor is None:
            self.register_parameter(slot, None)
            return
        packed = {} if spec is None else packed_meta(self._quantizer_of(slot, spec, self._shapes), tuple(tensor.shape), self.order)
        codes = packed.pop("", None)
        if codes is None or self._holds_values:
            stored = torch.empty_like(self._as_stored(tensor), device="meta")
            self.register_parameter(slot, nn.Parameter(stored, requires_grad=False))
        else:
            self.register_buffer(slot, self._as_stored(codes))
        if packed:
            self._store(slot, spec, packed)

    def _register_scales(self, slot: Slot, spec: TensorSpec) -> None:
        scales = packed_scales(self._quantizer_of(slot, spec, self._shapes), self._shapes.of_slot(slot), self.order)
        if scales:
            self._store(slot, spec, scales)

    def _store(self, slot: Slot, spec: TensorSpec | None, scales: dict[str, Tensor]) -> None:
        inside = {suffix: t for suffix, t in scales.items() if not self._is_beside_weight(suffix)}
        setattr(self, slot.quantizer_attribute, PackedScales(inside, spec))
        for suffix in filter(self._is_beside_weight, scales):
            self._flat[f"{slot.checkpoint_prefix}_{suffix}"] = (slot, suffix)
            self.register_buffer(f"{slot.checkpoint_prefix}_{suffix}", scales[suffix])

    def zero_points_of_symmetric_specs(self) -> Iterator[str]:
        """Yield the names of own tensors that a checkpoint may leave out, since all of their values are 0."""
        for name, (slot, suffix) in self._flat.items():
            symmetric = all(level.symmetric is not False for level in levels(getattr(self.layer_config, slot)))
            if symmetric and suffix.startswith("zero_point"):
                yield name

    def _stored(self, slot: Slot) -> dict[str, Tensor]:
        inner: PackedScales | None = getattr(self, slot.quantizer_attribute, None)
        flat = {suffix: getattr(self, name) for name, (owner, suffix) in self._flat.items() if owner == slot}
        return flat if inner is None else {**inner.tensors(), **flat}

    @torch.no_grad()
    def unpack(self) -> QuantizedLayer:
        """Return the quantized layer of the stored tensors, on their device.

        Its forward equals that of the exported layer.

        Raises:
            CheckpointError: A scale is not valid.
        """
        layer = self._float[0]
        quantized = quantized_class(layer).from_float(layer, self.layer_config)
        quantized._parameters, quantized._buffers = dict(quantized._parameters), dict(quantized._buffers)
        for slot in PARAMETERS:
            quantized._parameters[slot] = self._values(slot, getattr(quantized, slot.quantizer_attribute))
        for slot in ACTIVATIONS:
            target, stored = getattr(quantized, slot.quantizer_attribute), self._stored(slot)
            if target is not None and stored:
                qparams = target.quantizer.unpack_qparams(stored, self._shapes.of_slot(slot), order=self.order)
                refuse_bad_scales(qparams, f"the {slot.label} of '{self._name}'", activation=True)
                target.set_qparams(qparams)
        for name in self._others:
            tensors: dict[str, Any] = self._parameters if name in self._parameters else self._buffers
            (quantized._parameters if name in self._parameters else quantized._buffers)[name] = tensors[name]
        return quantized.train(self.training)

    def _values(self, slot: Slot, target: QuantizerModule | None) -> nn.Parameter | None:
        stored = getattr(self, slot)
        if stored is None:
            return None
        matrix = self._as_stored(stored)
        if target is None:
            return matrix if isinstance(matrix, nn.Parameter) else nn.Parameter(matrix, requires_grad=False)
        shape = self.weight_shape if slot is Slot.weight else self._bias_shape
        if self._holds_values:
            target.set_qparams(target.quantizer.unpack_qparams(self._stored(slot), shape, order=self.order))
            return nn.Parameter(matrix, requires_grad=False)
        tensors = {"": matrix, **self._stored(slot)}
        codes, qparams = target.quantizer.unpack(tensors, shape, order=self.order)
        if tuple(codes.shape) != shape:
            raise CheckpointError(f"the {slot} of '{self._name}' unpacks to {list(codes.shape)} where {list(shape)} is expected")
        refuse_bad_scales(qparams, f"the {slot} of '{self._name}'", activation=False)
        target.set_qparams(qparams)
        return nn.Parameter(cast_finite(target.quantizer.dequantize(codes, qparams), self.dtype), requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the quantized layer's output; the first call unpacks, and frees the packed tensors."""
        if self._ready is None:
            self._ready = self.unpack()
            for name in ("weight", "bias", *(slot.quantizer_attribute for slot in Slot), *self._flat):
                if name in self._buffers or name in self._parameters or name in self._modules:
                    delattr(self, name)
        output: Tensor = self._ready(*args, **kwargs)
        return output

    def extra_repr(self) -> str:
        """Return the class of the float layer and the shape of its weight, for ``repr``."""
        return f"{type(self._float[0]).__name__}, weight {list(self.weight_shape)}"


def without_weights(layer: nn.Module) -> nn.Module:
    """Return a shallow copy on the meta device.

    A packed layer must not keep the float weights of the model alive.
    """
    shell = copy.copy(layer)
    shell._parameters = {
        name: None if tensor is None else nn.Parameter(tensor.detach().to("meta"), requires_grad=False)
        for name, tensor in layer._parameters.items()
    }
    return shell


def stored_tensors(name: str, module: QuantizerModule, values: Tensor, order: str) -> dict[str, Tensor]:
    """Return the checkpoint tensors of a quantized tensor, by suffix.

    Every scale and a sample of the codes are checked.

    Args:
        name: Full name, for messages.
        module: The quantizer, which has the scales.
        values: Values on the quantizer's grid; float ones where the quantizer says so (``is_deferred``).
        order: Order of 4-bit codes in a word.

    Raises:
        ConfigError: The values are not on the grid, since they were changed after rounding.
        PluginError: Codes change when they are packed and unpacked; the message names the format.
    """
    quantizer, qparams = module.quantizer, module.qparams
    assert qparams is not None
    codes, complaint = _codes_and_complaint(name, module, values, order)
    tensors = quantizer.pack(codes, qparams, order=order)
    announced = packed_meta(quantizer, tuple(values.shape), order)
    if any(n in announced and (t.shape, t.dtype) != (announced[n].shape, announced[n].dtype) for n, t in tensors.items()):
        complaint = "packs to other shapes or dtypes than on the meta device, by which checkpoints are laid out"
    if complaint is not None:
        raise origin("formats", quantizer.stored_level.format.name).error(f"{complaint} (at '{name}')")
    return tensors


def checked_codes(name: str, module: QuantizerModule, values: Tensor) -> Tensor:
    """Return the codes of a quantized tensor. A sample of them is checked.

    Args:
        name: Full name, for messages.
        module: The quantizer, which has the scales.
        values: Values on the quantizer's grid.

    Raises:
        ConfigError: The values are not on the grid, since they were changed after rounding.
    """
    return _codes_and_complaint(name, module, values, "reorder")[0]


def _codes_and_complaint(name: str, module: QuantizerModule, values: Tensor, order: str) -> tuple[Tensor, str | None]:
    """Return the codes of values on a grid, and the error of the format that packs them.

    None where nothing is.
    """
    quantizer, qparams = module.quantizer, module.qparams
    assert qparams is not None
    codes = module.codes_of(values.detach())
    complaint = codes_error(quantizer, qparams, values.detach(), codes, order, is_rounded=not module.is_deferred)
    if complaint is not None and complaint != LOSSY:
        names = [level.dtype.name for level in levels(quantizer.spec)]
        raise ConfigError(
            f"'{name}' cannot be stored as {' → '.join(names)}: it {complaint}. It was changed after it was quantized, or by a broken "
            "plugin: quantize the model again"
        )
    return codes, complaint


def packed_meta(quantizer: TensorQuantizer, shape: tuple[int, ...], order: str) -> dict[str, Tensor]:
    """Return the checkpoint tensors of a quantized tensor of that shape by suffix, on the meta device."""
    return dict(_packed_meta(quantizer, shape, order))  # type: ignore[arg-type]  # quantizers are hashed by identity


def packed_scales(quantizer: TensorQuantizer, shape: tuple[int, ...], order: str) -> dict[str, Tensor]:
    """Return the stored scales of an activation of that shape by suffix, on the meta device.

    Empty where they are dynamic.
    """
    if quantizer.is_dynamic or quantizer.is_float:
        return {}
    return quantizer.pack_qparams(quantizer.empty_qparams(shape, "meta"), order=order)


@lru_cache(maxsize=1024)
def _packed_meta(quantizer: TensorQuantizer, shape: tuple[int, ...], order: str) -> dict[str, Tensor]:
    """Return `packed_meta`, cached by shape.

    Operations on meta tensors take longer than packing a small layer, and shapes repeat.
    """
    qparams = quantizer.empty_qparams(shape, "meta")
    codes = quantizer.quantize(torch.empty(shape, dtype=torch.float32, device="meta"), qparams)
    return quantizer.pack(codes, qparams, order=order)
