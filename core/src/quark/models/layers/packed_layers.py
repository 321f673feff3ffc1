"""PackedLayer: a layer that holds the tensors of a checkpoint while it is loaded.

`PackedLayer.unpack` or `PackedLayer.from_codes` creates the quantized layer when loading ends.

The tensors have the names that checkpoint loaders look for (``weight``, ``weight_quantizer.scale``, …). Their
shapes and dtypes come from packing meta tensors, so that they always agree with the packing code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from quark.config.layer import QLayerConfig, TensorSpec, levels
from quark.config.slot import ACTIVATIONS, PARAMETERS, Slot
from quark.errors import CheckpointError, ConfigError
from quark.models.layers.coded_layer import refuse_bad_scales, restored_parameter
from quark.models.layers.layer_types import LayerShape
from quark.models.layers.layers_from_codes import Packed, runs_from_codes
from quark.models.layers.packed_weight import FormatPacking, PackedWeight
from quark.models.layers.quantized_layers import QuantizedLayer, linear_weight, quantized_class
from quark.models.layers.quantizer_module import QuantizerModule
from quark.numbers.build import canonicalize
from quark.numbers.on_grid import LOSSY, codes_error
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.plugins.attribution import origin

__all__ = [
    "Packed",
    "PackedLayer",
    "PackedScales",
    "as_parameter",
    "checked_codes",
    "packed_meta",
    "packed_scales",
    "restore",
    "stored_tensors",
    "without_weights",
]


class PackedScales(nn.Module):
    """The stored scales of one tensor, under their checkpoint suffixes: ``scale``, ``zero_point``, …

    Args:
        tensors: The tensors by suffix.
        spec: The quantization of the tensor.
    """

    def __init__(self, tensors: dict[str, Tensor], spec: TensorSpec | None) -> None:
        super().__init__()
        self._is_symmetric = _is_symmetric(spec)
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
    """

    def __init__(
        self,
        layer: nn.Module,
        config: QLayerConfig,
        order: str,
        name: str = "a layer",
        holds_values: bool = False,
    ) -> None:
        super().__init__()
        weight = linear_weight(layer)
        bias: Tensor | None = getattr(layer, "bias", None)
        self._float = (without_weights(layer),)  # in a tuple, so that its parameters are not this module's
        self.layer_config = config
        self.order = order
        self._name = name
        self._holds_values = holds_values
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
        stored = torch.empty_like(tensor, device="meta") if codes is None or self._holds_values else codes
        # Codes are a parameter too: transformers asks for those of tied layers while it loads.
        self.register_parameter(slot, nn.Parameter(self._as_stored(stored), requires_grad=False))
        if packed:
            setattr(self, slot.quantizer_attribute, PackedScales(packed, spec))

    def _register_scales(self, slot: Slot, spec: TensorSpec) -> None:
        scales = packed_scales(self._quantizer_of(slot, spec, self._shapes), self._shapes.of_slot(slot), self.order)
        if scales:
            setattr(self, slot.quantizer_attribute, PackedScales(scales, spec))

    def put_beside_weight(self, is_wanted: Callable[[str], bool]) -> None:
        """Make stored scales buffers of this module, for a loader that looks for them there.

        Args:
            is_wanted: Whether the scale of a stored name, ``weight_scale``, is one of them. The others stay
                in a submodule, as ``weight_quantizer.scale``.
        """
        for slot in (slot for slot in Slot if getattr(self.layer_config, slot) is not None):
            inner: PackedScales | None = getattr(self, slot.quantizer_attribute, None)
            if inner is not None:
                for suffix, scale in inner.tensors().items():
                    name = f"{slot.checkpoint_prefix}_{suffix}"
                    if is_wanted(name):
                        self._flat[name] = (slot, suffix)
                        self.register_buffer(name, scale)
                        del inner._buffers[suffix]

    def zero_points_of_symmetric_specs(self) -> Iterator[str]:
        """Yield the names of own tensors that a checkpoint may leave out, since all of their values are 0."""
        for name, (slot, suffix) in self._flat.items():
            if _is_symmetric(getattr(self.layer_config, slot)) and suffix.startswith("zero_point"):
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
        return self._quantized(PARAMETERS)

    @torch.no_grad()
    def from_codes(self) -> QuantizedLayer:
        """Return a layer that computes the same and keeps the stored tensors of its weight.

        Where the checkpoint holds values, `unpack`.

        Raises:
            CheckpointError: A scale is not valid.
        """
        if self.layer_config.weight is None or self._holds_values:
            return self.unpack()
        packing = FormatPacking(self._quantizer_of(Slot.weight, self.layer_config.weight, self._shapes), self.order, self._as_stored)
        tensors = {"": self.get_parameter(Slot.weight).data, **self._stored(Slot.weight)}
        weight = PackedWeight(packing, tensors, self.weight_shape, self.dtype, self._name)
        return runs_from_codes(self._quantized((Slot.bias,)), weight)

    def _quantized(self, parameters: Iterable[Slot]) -> QuantizedLayer:
        """Return the quantized layer with some of its parameters, and all other tensors."""
        layer = self._float[0]
        quantized = quantized_class(layer).from_float(layer, self.layer_config)
        shapes = {Slot.weight: self.weight_shape, Slot.bias: self._bias_shape}
        quantized._parameters |= dict.fromkeys(parameters)
        for slot in (*parameters, *ACTIVATIONS):
            tensors = self._stored(slot)
            if not slot.is_activation and (stored := getattr(self, slot)) is not None:
                tensors[""] = self._as_stored(stored)
            if tensors and (target := getattr(quantized, slot.quantizer_attribute)) is not None:
                shape = shapes[slot] if slot in shapes else self._shapes.of_slot(slot)
                restored = restore(target, slot, tensors, shape, self.dtype, self.order, self._name, holds_values=self._holds_values)
                quantized._parameters |= restored
            elif "" in tensors:
                quantized._parameters[slot] = as_parameter(tensors[""])
        for name in self._others:
            others: dict[str, Any] = self._parameters if name in self._parameters else self._buffers
            (quantized._parameters if name in self._parameters else quantized._buffers)[name] = others[name]
        return quantized.train(self.training)

    def extra_repr(self) -> str:
        """Return the class of the float layer and the shape of its weight, for ``repr``."""
        return f"{type(self._float[0]).__name__}, weight {list(self.weight_shape)}"


def restore(
    quantizer: QuantizerModule,
    slot: Slot,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    order: str,
    name: str,
    *,
    holds_values: bool = False,
) -> dict[str, nn.Parameter]:
    """Set a quantizer to stored scales, and return the parameter by its name; of an activation nothing.

    The inverse of `stored_tensors`.

    Args:
        quantizer: Of a tensor of a layer.
        slot: The tensor.
        tensors: By suffix; codes or values in the layout of the layer.
        shape: Of the tensor, as its quantizer sees it.
        dtype: Of the parameter.
        order: Order of 4-bit codes in a word.
        name: Full name of the layer, for messages.
        holds_values: Whether parameters are stored as values and not as codes.

    Raises:
        CheckpointError: A scale is not valid, or the codes are of another shape.
    """
    inner, stored = quantizer.quantizer, dict(tensors)
    if slot.is_activation or holds_values:
        qparams = inner.unpack_qparams(stored, shape, order=order)
        if slot.is_activation:
            refuse_bad_scales(qparams, f"the {slot.label} of '{name}'", activation=True)
        quantizer.set_qparams(qparams)
        return {} if slot.is_activation else {slot: as_parameter(stored[""])}
    codes, qparams = inner.unpack(stored, shape, order=order)
    if tuple(codes.shape) != shape:
        raise CheckpointError(f"the {slot} of '{name}' unpacks to {list(codes.shape)} where {list(shape)} is expected")
    refuse_bad_scales(qparams, f"the {slot} of '{name}'", activation=False)
    return {slot: restored_parameter(quantizer, codes, qparams, dtype)}


def as_parameter(tensor: Tensor) -> nn.Parameter:
    """Return a tensor as a parameter without gradient; a parameter itself."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


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


def _is_symmetric(spec: TensorSpec | None) -> bool:
    """Return whether no level of a spec has zero points, once formats have made the spec explicit."""
    return spec is None or all(level.symmetric is not False for level in canonicalize(spec))


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
    return quantizer.pack(*quantizer.empty_codes(shape), order=order)
