"""Functions that find the registered layer type of a float layer, and the shapes of the layer's tensors."""

from __future__ import annotations

import copy
import sys
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from quark.base.lazy import ObjectRef, Reference
from quark.config.layer import Slot
from quark.errors import ConfigError
from quark.numbers import output_first_shape
from quark.plugins import LayerTypeRecord, layer_types
from quark.plugins.registries import LayerTypeRegistry

if TYPE_CHECKING:
    from quark.models.layers.quantized_layers import QuantizedLayer

_HARMLESS = {"__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__firstlineno__", "__static_attributes__"} | {
    "__constants__", "__annotate_func__", "__annotations_cache__", "reset_parameters", "extra_repr", "__repr__"
}  # fmt: skip
"""Names of attributes that a subclass may define although it computes the same as its base class."""


@attrs.frozen(eq=False)
class LayerType:
    """A registered layer type whose float class has been imported.

    Attributes:
        record: The registered record.
        planned_as: Configurations and algorithms treat a layer of this type as a layer of this class.
        planned_name: The registered name of ``planned_as``. Plans use this name.
    """

    record: LayerTypeRecord
    planned_as: type[nn.Module]
    planned_name: str
    _name: str

    @cached_property
    def quantized(self) -> type[QuantizedLayer]:
        """The quantized class of the layer type.

        Raises:
            PluginError: The class cannot be imported, or is not a `QuantizedLayer`.
        """
        return layer_types().load_quantized(self._name)


def layer_type_of(layer: nn.Module) -> LayerType | None:
    """Return the layer type of a float layer, or None if the layer cannot be quantized.

    The result is the type that is registered for the layer's class. If no type is registered for this class,
    the result is the type of the nearest base class that has a registered type. In that case, the layer must
    not override anything of the base class, with two exceptions. A subclass of ``nn.Linear`` may override
    methods if it computes the same (`is_verbatim_linear`), and an embedding may multiply its rows by a
    constant (`is_scaled_lookup`).
    """
    layer_type = layer_type_of_class(type(layer)) or _inherited(layer)
    return None if layer_type is None or layer_type.record.quantized is None else layer_type


def _inherited(layer: nn.Module) -> LayerType | None:
    """Return the layer type of the nearest base class that has a registered type.

    Return None if there is no such base class, or if the layer does not compute the same as the base class.
    """
    for base in type(layer).__mro__[1:]:
        layer_type = layer_type_of_class(base)
        if layer_type is not None:
            is_same = is_verbatim_linear(layer) if base is nn.Linear else _overrides_nothing(type(layer), base) or is_scaled_lookup(layer)
            return layer_type if is_same else None
    return None


def is_scaled_lookup(layer: nn.Module) -> bool:
    """Return whether a layer is of a subclass of ``nn.Embedding`` that multiplies the rows by one constant.

    An example is the embedding of Gemma. The function runs a copy of the layer that has a small random
    float64 weight and buffers of ones. It checks that each output equals a row of the weight multiplied by
    the same factor.
    """
    kind = type(layer)
    if (
        not isinstance(layer, nn.Embedding)
        or kind.forward is nn.Embedding.forward
        or layer._modules
        or set(layer._parameters) != {"weight"}
    ):
        return False
    if any(buffer is None or buffer.numel() != 1 for buffer in layer._buffers.values()):
        return False
    # Models are prepared for loading under the meta device, where tensors have no values to compare.
    with torch.device("cpu"), torch.no_grad():
        weight, ids = torch.randn((_IN, _OUT), generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(_IN)[None]
        tiny = copy.copy(layer)
        tiny._parameters = {"weight": nn.Parameter(weight)}
        tiny._buffers = {name: torch.ones((), dtype=torch.float64) for name in layer._buffers}
        try:
            output = kind.forward(tiny, ids)
        except Exception:  # any error: a layer that cannot be called like an embedding does not count as one
            return False
        if not isinstance(output, Tensor) or output.shape != (1, _IN, _OUT):
            return False
        factor = output[0, 0, 0] / weight[0, 0]
        return bool(factor.isfinite() & (factor != 0)) and torch.allclose(output[0], weight * factor, rtol=_TOLERANCE, atol=_TOLERANCE)


def _overrides_nothing(layer_class: type[nn.Module], base: type[nn.Module]) -> bool:
    """Return whether ``layer_class`` adds no code and no parameters to its base class ``base``."""
    own = layer_class.__mro__[: layer_class.__mro__.index(base)]
    names = {name for cls in own for name in vars(cls)} - _HARMLESS
    return not any(hasattr(base, name) for name in names) and not names & {"weight", "bias"}


def layer_type_of_class(layer_class: type[Any]) -> LayerType | None:
    """Return the layer type that is registered for exactly this class, or None if there is none.

    The result may be a type whose layers are never quantized.
    """
    registry = layer_types()
    return _registered_for(layer_class, registry, registry.revision)  # type: ignore[arg-type]  # classes are hashed by identity


def is_lookup(layer_class: type[Any]) -> bool:
    """Return whether the inputs of layers of ``layer_class`` are indices, like the inputs of embeddings."""
    layer_type = layer_type_of_class(layer_class)
    return layer_type is not None and layer_type.record.lookup


def is_by_name(layer_class: type[Any]) -> bool:
    """Return whether layers of ``layer_class`` are quantized only if the configuration names them.

    A configuration names a layer with a pattern that matches the layer's name, or with the layer's type.
    """
    layer_type = layer_type_of_class(layer_class)
    return layer_type is not None and layer_type.record.by_name


def planned_names() -> list[str]:
    """Return a sorted list of the class names that ``layer_type_quant_config`` may contain."""
    return sorted({_class_name(record.layer) for record in layer_types() if record.quantized is not None and record.planned_as is None})


# Quark calls this for each module of a model, so the result is cached until the registry changes.
@lru_cache(maxsize=1024)
def _registered_for(layer_class: type[Any], registry: LayerTypeRegistry, revision: tuple[int, int]) -> LayerType | None:
    """Return the layer type that ``registry`` has for exactly ``layer_class``, or None.

    ``revision`` changes if the registry changes. It is only part of the key under which the result is cached.
    """
    claims = [name for name in registry.names() if _loaded(registry.get(name).layer) is layer_class]
    if not claims:
        return None
    if len(claims) > 1:
        sources = " and ".join(f"'{name}' of {registry.source(name)}" for name in claims)
        raise ConfigError(
            f"the class {layer_class.__module__}.{layer_class.__qualname__} is registered as the layer types {sources}. Disable one plugin "
            'with QUARK_DISABLED_PLUGINS, or register one type under the name of the other with replaces="..."'
        )
    record = registry.get(claims[0])
    if record.planned_as is None:
        return LayerType(record, layer_class, claims[0], claims[0])
    return LayerType(record, registry.load_layer(record.planned_as), registry.get(record.planned_as).name, claims[0])


def _class_name(reference: Reference) -> str:
    """Return the name of the class that a reference points to, without importing the class."""
    if isinstance(reference, ObjectRef):
        return str(reference.target.__name__)
    return reference.attribute.rpartition(".")[2]


def _loaded(reference: Reference) -> Any:
    """Return the object that a reference points to. Return None if the module of the object is not imported
    yet."""
    if isinstance(reference, ObjectRef):
        return reference.target
    loaded: Any = sys.modules.get(reference.module)
    for part in reference.attribute.split("."):
        loaded = getattr(loaded, part, None)
    return loaded


_IN, _OUT = 3, 2
_TOLERANCE = 1e-12


def is_verbatim_linear(layer: nn.Module) -> bool:
    """Return whether a layer is an ``nn.Linear``, or an instance of a subclass that computes the same.

    Such a layer is quantized like an ``nn.Linear``. It must have no tensors but ``weight`` and ``bias``, and
    ``bias`` may be None. The function also runs a copy of the layer with small random float64 tensors, and
    compares the output with the output of ``nn.Linear``. So the result is False for routers that select
    experts, for low-rank adapters, for layers with weights that are codes, and for layers with grouped
    matrices.
    """
    if not isinstance(layer, nn.Linear) or layer._modules or layer._buffers:
        return False
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    plain = set(layer._parameters) == {"weight", "bias"} and type(weight) is nn.Parameter and weight.is_floating_point()
    if not plain or weight is None or tuple(weight.shape) != (layer.out_features, layer.in_features):
        return False
    return type(layer).forward is nn.Linear.forward or _forward_agrees(layer, has_bias=bias is not None)


def _forward_agrees(layer: nn.Linear, *, has_bias: bool) -> bool:
    # Models are prepared for loading under the meta device, where tensors have no values to compare.
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        sizes = ((_OUT, _IN), (_OUT,), (2, 2, _IN))
        weight, bias, x = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
        tiny = copy.copy(layer)
        tiny._parameters = {"weight": nn.Parameter(weight), "bias": nn.Parameter(bias) if has_bias else None}
        tiny.in_features, tiny.out_features = _IN, _OUT
        expected = functional.linear(x, weight, bias if has_bias else None)
        try:
            output = type(tiny).forward(tiny, x)
        except Exception:  # any error: a layer that cannot be called like a linear layer does not count as one
            return False
        return isinstance(output, Tensor) and output.shape == expected.shape and torch.allclose(output, expected, rtol=0, atol=_TOLERANCE)


@attrs.frozen
class LayerShape:
    """The shapes of the tensors of a layer.

    Attributes:
        weight: Shape of the weight, always with the output channels as the first axis, even if the float
            class stores the weight in another layout. The shape is ``[out, in]`` for a linear layer, ``[out,
            in / groups, *kernel]`` for a convolution, and ``[tokens, features]`` for an embedding.
        groups: Number of groups of a convolution. It is 1 for other layers.
        is_transposed: Whether the float class stores the weight as ``[in, out / groups, …]``.
        is_lookup: Whether the input of the layer consists of indices, like the input of an embedding.
    """

    weight: tuple[int, ...]
    groups: int = 1
    is_transposed: bool = False
    is_lookup: bool = False

    @classmethod
    def of(cls, layer: nn.Module) -> Self:
        """Return the shapes of a float layer with a registered layer type.

        ``groups`` of the result is the attribute ``groups`` of the layer, or 1 if the layer has none.
        """
        groups = getattr(layer, "groups", 1)
        groups = groups if isinstance(groups, int) else 1
        stored: Tensor = layer.weight  # type: ignore[assignment]
        shape, layer_type = tuple(stored.shape), _known_type(layer)
        weight = output_first_shape(shape, groups) if is_transposed(layer) else shape
        return cls(weight, groups, is_transposed(layer), layer_type is not None and layer_type.record.lookup)

    @property
    def rank(self) -> int:
        """The number of axes of the weight."""
        return len(self.weight)

    def of_slot(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of one tensor of the layer in the layout in which the quantizer gets this tensor.

        For a weight, this is the shape in the quantized layer: ``[out, in]`` in linear layers, and torch's
        layout in other layers. For activations, only the number of features is known before a run. So the
        result is the shape for a single token or position, ``[1, features]`` or ``[1, channels, 1, …]``. If
        the input consists of indices, its shape is ``[1]``.
        """
        outputs, kernel = (self.weight[1:2] if self.is_lookup else self.weight[:1]), (1,) * (self.rank - 2)
        if slot is Slot.weight:
            is_exchanged = self.is_transposed and self.rank > 2
            return output_first_shape(self.weight, self.groups) if is_exchanged else self.weight
        if slot is Slot.bias:
            return outputs
        if slot is Slot.output_tensors:
            return (1, *outputs, *kernel)
        return (1,) if self.is_lookup else (1, *(size * self.groups for size in self.weight[1:2]), *kernel)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether the class of a float layer stores the weight as ``[in, out / groups, …]``."""
    layer_type = _known_type(layer)
    return layer_type is not None and layer_type.record.transposed


def _known_type(layer: nn.Module) -> LayerType | None:
    """Return the layer type of a float layer, or None if it has none. The result may be a type whose layers
    stay float."""
    return layer_type_of_class(type(layer)) or layer_type_of(layer)
