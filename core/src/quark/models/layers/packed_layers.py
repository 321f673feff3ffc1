"""Modules that contain the stored tensors of a layer or a quantizer while a checkpoint is loaded.

A `PackedLayer` replaces a layer. Its tensors have the names that checkpoint loaders expect, such as
``weight`` and ``weight_quantizer.scale``. After loading, `PackedLayer.unpack` or `PackedLayer.from_codes`
creates the quantized layer. In the same way, a `PackedQuantizer` replaces a quantizer of an attention module.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quark.config.layer import ACTIVATIONS, PARAMETERS, QLayerConfig, Slot, TensorSpec
from quark.errors import CheckpointError
from quark.models.layers.coded_layer import as_parameter, packed_meta, packed_scales, restore
from quark.models.layers.layer_types import LayerShape
from quark.models.layers.layers_from_codes import Packed, runs_from_codes
from quark.models.layers.packed_weight import FormatPacking, PackedWeight
from quark.models.layers.quantized_layers import BRANCH, QuantizedLayer, linear_weight, quantized_class
from quark.models.layers.quantizer_module import QuantizerModule
from quark.numbers import canonicalize, quantizer_for


class PackedScales(nn.Module):
    """A module that contains the stored scales of one quantized tensor as buffers.

    The name of a buffer is the suffix of the tensor's name in the checkpoint, such as ``scale`` or
    ``zero_point``.

    Args:
        tensors: A dictionary from suffix to stored tensor.
        spec: The quantization of the tensor that the scales belong to.
    """

    def __init__(self, tensors: dict[str, Tensor], spec: TensorSpec | None) -> None:
        super().__init__()
        self._is_symmetric = _is_symmetric(spec)
        self._moved: dict[str, tuple[nn.Module, str]] = {}
        for suffix, tensor in tensors.items():
            self.register_buffer(suffix, tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Return a dictionary from suffix to stored tensor. It includes tensors that `move` has moved."""
        moved = {suffix: owner.get_buffer(name) for suffix, (owner, name) in self._moved.items()}
        return {**self._buffers, **moved}  # type: ignore[dict-item]

    def move(self, suffix: str, owner: nn.Module, name: str) -> None:
        """Remove the tensor with the suffix ``suffix`` from this module, and make it the buffer ``name`` of
        ``owner``."""
        owner.register_buffer(name, self._buffers.pop(suffix))
        self._moved[suffix] = owner, name

    def zero_points_of_symmetric_specs(self) -> Iterator[str]:
        """Yield the suffixes of zero points that a checkpoint may leave out because all zero points are 0."""
        return (suffix for suffix in self._buffers if self._is_symmetric and suffix.startswith("zero_point"))


class PackedLayer(Packed):
    """A module that replaces a layer while a checkpoint is loaded. It contains the stored tensors of the
    layer.

    Args:
        layer: The float layer. Its weight and bias are not used, and may be on any device.
        config: The quantization of the layer.
        order: Packing order of 4-bit codes in a word, ``"reorder"`` or ``"order"``.
        name: Full name of the layer in its model, for messages.
        holds_values: Whether the checkpoint has rounded values instead of codes. The checkpoint has scales in
            both cases.
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
        self._float = (without_weights(layer),)  # in a tuple, so that its parameters are not registered here
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
        """Register all tensors of ``layer`` except its weight and bias. Their names do not change.

        The submodules of ``layer`` become submodules of this module too.
        """
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
        """Register meta tensors for the tensors that the checkpoint stores for a weight or a bias."""
        if tensor is None:
            self.register_parameter(slot, None)
            return
        packed = {} if spec is None else packed_meta(self._quantizer_of(slot, spec, self._shapes), tuple(tensor.shape), self.order)
        codes = packed.pop("", None)
        stored = torch.empty_like(tensor, device="meta") if codes is None or self._holds_values else codes
        # Codes are a parameter too, because transformers asks for the parameters of tied layers while it
        # loads.
        self.register_parameter(slot, nn.Parameter(self._as_stored(stored), requires_grad=False))
        if packed:
            setattr(self, slot.quantizer_attribute, PackedScales(packed, spec))

    def _register_scales(self, slot: Slot, spec: TensorSpec) -> None:
        """Register meta tensors for the static scales of an activation.

        Do nothing if the scales are dynamic.
        """
        scales = packed_scales(self._quantizer_of(slot, spec, self._shapes), self._shapes.of_slot(slot), self.order)
        if scales:
            setattr(self, slot.quantizer_attribute, PackedScales(scales, spec))

    def put_beside_weight(self, is_wanted: Callable[[str], bool]) -> None:
        """Turn the scales that the loader expects in this module into buffers of this module.

        All other scales stay in a submodule. An example is ``weight_quantizer.scale``.

        Args:
            is_wanted: A function that returns whether the loader expects a scale in this module. Its argument
                is the stored name of the scale, such as ``weight_scale``.
        """
        for slot in Slot:  # also an output that attention quantizes
            inner: PackedScales | None = getattr(self, slot.quantizer_attribute, None)
            if inner is not None:
                for suffix in inner.tensors():
                    name = f"{slot.checkpoint_prefix}_{suffix}"
                    if is_wanted(name):
                        self._flat[name] = (slot, suffix)
                        inner.move(suffix, self, name)

    def zero_points_of_symmetric_specs(self) -> Iterator[str]:
        """Yield the names of zero points that a checkpoint may leave out because all their values are 0.

        The result includes only buffers of this module itself, not buffers of its submodules.
        """
        for name, (slot, suffix) in self._flat.items():
            if _is_symmetric(getattr(self.layer_config, slot)) and suffix.startswith("zero_point"):
                yield name

    def initialize_buffers(self, initialize: Callable[[nn.Module], None]) -> None:
        """Compute the buffers that no checkpoint stores, in place.

        Args:
            initialize: A function that initializes the buffers of a float layer.
        """
        if computed := {name: self._buffers[name] for name in self._others if name in self._non_persistent_buffers_set}:
            self._float[0]._buffers = computed
            initialize(self._float[0])

    def can_share_codes(self, other: PackedLayer) -> bool:
        """Return whether this layer and ``other`` can share one stored weight."""
        return self.layer_config.weight is not None and self._weight_form() == other._weight_form()

    def _weight_form(self) -> tuple[object, ...]:
        """Return all properties that determine the form in which the weight is stored.

        Layers for which this method returns equal values can share a weight.
        """
        spec = self.layer_config.weight
        quantizer = None if spec is None else self._quantizer_of(Slot.weight, spec, self._shapes)
        return spec, quantizer, self.weight_shape, self.order, self._holds_values, self._as_stored

    def weight_tensors(self) -> list[str]:
        """Return the names of the stored tensors of the weight, relative to this module."""
        inner = [f"{Slot.weight.quantizer_attribute}.{suffix}" for suffix in self._inner(Slot.weight)]
        return [Slot.weight, *inner, *(name for name, (slot, _) in self._flat.items() if slot is Slot.weight)]

    def share_codes(self, source: PackedLayer) -> None:
        """Replace the stored tensors of this layer's weight by the stored tensors of ``source``. Nothing is
        copied."""
        self._parameters[Slot.weight] = source._parameters[Slot.weight]
        attribute = Slot.weight.quantizer_attribute
        if attribute in source._modules:  # not all formats store scales
            self._modules[attribute] = source._modules[attribute]
        stored = source._stored(Slot.weight)
        for name in (name for name, (slot, _) in self._flat.items() if slot is Slot.weight):
            self._buffers[name] = stored[self._flat[name][1]]

    def _stored(self, slot: Slot) -> dict[str, Tensor]:
        """Return a dictionary from suffix to scale, with all stored scales of the tensor ``slot``."""
        flat = {suffix: getattr(self, name) for name, (owner, suffix) in self._flat.items() if owner == slot}
        return {**self._inner(slot), **flat}

    def _inner(self, slot: Slot) -> dict[str, Tensor]:
        """Return a dictionary from suffix to scale, with the stored scales of the tensor ``slot`` that are in
        a submodule."""
        scales = self._modules.get(slot.quantizer_attribute)
        return dict(scales._buffers) if isinstance(scales, PackedScales) else {}  # type: ignore[arg-type]

    @torch.no_grad()
    def unpack(self) -> QuantizedLayer:
        """Return the quantized layer that the stored tensors describe, on the device of these tensors.

        The outputs of the returned layer equal the outputs of the layer that was exported.

        Raises:
            CheckpointError: A scale is not valid.
        """
        return self._quantized(PARAMETERS)

    @torch.no_grad()
    def from_codes(self) -> QuantizedLayer:
        """Return a layer that computes the same as the result of `unpack`, but keeps its weight packed.

        If the checkpoint stores values instead of codes, or the weight is float, return the result of
        `unpack`.

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
        """Return the quantized layer. The weight or the bias is only restored if ``parameters`` contains its
        slot.

        All other tensors of the layer are always restored.
        """
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
        if BRANCH in self._modules:
            quantized._modules[BRANCH] = self._modules[BRANCH]
        return quantized.train(self.training)

    def extra_repr(self) -> str:
        """Return a text for ``repr`` with the class of the float layer and the shape of its weight."""
        return f"{type(self._float[0]).__name__}, weight {list(self.weight_shape)}"


def without_weights(layer: nn.Module) -> nn.Module:
    """Return a shallow copy of ``layer`` with its parameters on the meta device.

    A packed layer keeps only this copy, so that the memory of the float weights can be freed.
    """
    shell = copy.copy(layer)
    shell._parameters = {
        name: None if tensor is None else nn.Parameter(tensor.detach().to("meta"), requires_grad=False)
        for name, tensor in layer._parameters.items()
    }
    return shell


def _is_symmetric(spec: TensorSpec | None) -> bool:
    """Return whether no level of the canonicalized spec has zero points.

    The result is True if ``spec`` is None.
    """
    return spec is None or all(level.symmetric is not False for level in canonicalize(spec))


class ScalesOf:
    """The stored scales of one tensor, as buffers of an existing module. Loaders expect these scales in that
    module.

    An example is the scale ``k_scale`` of an attention module.

    Args:
        owner: The module that gets the buffers.
        name: Prefix of the names of the buffers, such as ``k``.
        tensors: A dictionary from suffix to scale, as `quark.models.layers.coded_layer.packed_scales` returns
            it.
    """

    def __init__(self, owner: nn.Module, name: str, tensors: dict[str, Tensor]) -> None:
        self._owner = owner
        self._names = {suffix: f"{name}_{suffix}" for suffix in tensors}
        for suffix, tensor in tensors.items():
            owner.register_buffer(self._names[suffix], tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Return a dictionary from suffix to scale."""
        return {suffix: self._owner.get_buffer(name) for suffix, name in self._names.items()}

    def free(self) -> None:
        """Remove the buffers from the module that owns them."""
        for name in self._names.values():
            del self._owner._buffers[name]
        self._names = {}


def as_vector(scale: Tensor) -> Tensor:
    """Return a scale in the shape that compressed-tensors uses for scales of attention.

    The shape ``[]`` becomes ``[1]``. The shape ``[heads]`` of scales per head becomes ``[heads, 1, 1]``.
    """
    return scale.reshape(-1, 1, 1) if scale.ndim else scale.reshape(1)


class PackedQuantizer(PackedScales, Packed):
    """A module that replaces a quantizer of an activation while a checkpoint is loaded.

    A checkpoint loader fills the scales, and `unpack` then creates the quantizer.

    Args:
        spec: Spec of the activation.
        order: Packing order of 4-bit codes in a word in the checkpoint, ``"reorder"`` or ``"order"``.
        stored: The object with the stored scales. None means that the scales are buffers of this module. For
            example, a checkpoint stores the scales of keys with the key projection, or with the attention
            module if the projection is fused.
        largest: The upper bound of valid scales.
        shape: Shape of the activation, which determines the shape of the scales.
    """

    def __init__(
        self,
        spec: TensorSpec,
        order: str,
        stored: PackedScales | ScalesOf | None = None,
        largest: float = math.inf,
        shape: tuple[int, ...] = (1,),
    ) -> None:
        announced = packed_scales(quantizer_for(spec, activation=True), shape, order)
        super().__init__(announced if stored is None else {}, spec)
        self._shape = shape
        self._shapes = {suffix: tensor.shape for suffix, tensor in announced.items()}
        self.spec = spec
        self.order = order
        self.largest = largest
        self._stored: tuple[PackedScales | ScalesOf] = (stored or self,)  # in a tuple, so that it is not registered twice

    def unpack(self) -> QuantizerModule:
        """Return the quantizer, on the device of its scales.

        Raises:
            CheckpointError: A scale is not positive, not finite or larger than the upper bound. The scales
                are uninitialized if the checkpoint lacks them and the loader only warns of missing tensors.
        """
        module = QuantizerModule(self.spec, activation=True)
        tensors = self._stored[0].tensors()
        if tensors:
            tensors = {suffix: tensor.reshape(self._shapes[suffix]) for suffix, tensor in tensors.items()}
            qparams = module.quantizer.unpack_qparams(tensors, self._shape, order=self.order)
            if not bool(((qparams.scale > 0) & (qparams.scale <= self.largest) & torch.isfinite(qparams.scale)).all()):
                raise CheckpointError(
                    f"a scale inside attention is {qparams.scale.tolist()}, because softmax_quant_spec or kv_cache_post_rope requires "
                    "scales that the checkpoint lacks. Read the checkpoint with quark.checkpoint.import_model_from_safetensors, which "
                    "names missing scales and leaves probabilities without scales in float"
                )
            module.set_qparams(qparams)
            if isinstance(self._stored[0], ScalesOf):
                self._stored[0].free()
        return module.train(self.training)
