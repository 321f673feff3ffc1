"""`LayerStorage`, which names and packs the tensors of a quantized linear layer in one layout.

The same object is used for writing and reading. If a layout does not pack codes like the number formats, for
example because it stores them as ``qweight`` or ``weight_packed``, implement a `LayerStorage` for this
layout. `quark.checkpoint.CheckpointExporter` and `StorageReader` then write and read whole models. While a
checkpoint is loaded, a `StoredLayer` contains the stored tensors of each layer. After loading, a quantized
layer replaces the `StoredLayer`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs
import torch
from torch import Tensor, nn

from quark.base.names import matches, without_numbers
from quark.checkpoint.layout_reader import LayoutReader, StoredConfig
from quark.checkpoint.packed_model import pack_model
from quark.config.layer import QLayerConfig, TensorSpec
from quark.config.model import QConfig
from quark.errors import CheckpointError
from quark.models.hf.dequantizer import LayerCodes
from quark.models.hf.shards import check_shards
from quark.models.layers import QuantizedLayer, linear_weight, quantized_class
from quark.models.layers.coded_layer import CodedLayer
from quark.models.layers.layers_from_codes import Packed, runs_from_codes
from quark.models.layers.packed_layers import without_weights
from quark.models.layers.packed_weight import PackedWeight
from quark.models.plan.quant_plan import QuantPlan
from quark.numbers import QParams, TensorQuantizer, quantizer_for


class LayerStorage(Protocol):
    """The protocol of objects that name and pack the tensors of a quantized linear layer.

    The result of each method must depend only on the arguments and on the object.
    """

    def __hash__(self) -> int: ...

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        """Return why a layer with the configuration ``config`` cannot be stored, or None if it can be stored.

        ``shape`` is the shape of the layer's weight.
        """

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        """Return the tensors to store for a layer, as a dictionary from the last part of the name to tensor.

        quark calls this method only for layers for which `why_not` returns None. The method must also work
        with meta tensors.
        """

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        """Return the codes and scales of a layer whose weight has the shape ``shape``.

        This is the inverse of `stored`.
        """


def layer_codes(
    layer: str, config: QLayerConfig, shape: tuple[int, ...], storage: LayerStorage, names: Mapping[str, str]
) -> tuple[LayerCodes, ...]:
    """Return a tuple with one `LayerCodes`, so that a run can write a stored layer again without rounding it.

    The tuple is empty if the input of the layer has static scales that the checkpoint does not store.

    Args:
        layer: Full name of the layer.
        config: Quantization of the layer.
        shape: Shape of the weight.
        storage: Storage of the layout.
        names: A dictionary from the name that ``storage`` uses for a tensor to the tensor's full name in the
            checkpoint.
    """
    inputs = None if config.input_tensors is None else quantizer_for(config.input_tensors, activation=True)
    if inputs is not None and not inputs.is_dynamic and not any(leaf.startswith("input_") for leaf in names):
        return ()

    def read(tensors: Mapping[str, Tensor]) -> CodedLayer:
        return storage.restored(config, shape, {leaf: tensors[name] for leaf, name in names.items()})

    return (LayerCodes(name=layer, config=config, shape=shape, read=read),)


def meta_tensors(storage: LayerStorage, config: QLayerConfig, shape: tuple[int, ...]) -> Mapping[str, Tensor]:
    """Return meta tensors for the stored tensors of a layer, as a dictionary from name to meta tensor.

    ``shape`` is the shape of the weight. Layers with the same configuration and shape share these tensors.
    """
    return _on_meta(storage, _key(config.weight), _key(config.input_tensors), shape)


def _key(spec: TensorSpec | None) -> TensorSpec | None:
    """Return ``spec`` in a hashable form, which can be a key of a cache."""
    return tuple(spec) if isinstance(spec, list) else spec


# Operations on meta tensors are slow, and a model has few kinds of layers, so results are cached.
@lru_cache(maxsize=1024)
def _on_meta(storage: LayerStorage, weight: TensorSpec, inputs: TensorSpec | None, shape: tuple[int, ...]) -> Mapping[str, Tensor]:
    return storage.stored(CodedLayer.empty(QLayerConfig(weight=weight, input_tensors=inputs), shape))


class StorageReader(LayoutReader):
    """The base class of readers for layouts in which a `LayerStorage` packs the layers.

    The names of the stored tensors determine which layers have codes. The ``quantization_config`` determines
    the form of the codes.

    Attributes:
        storage: The `LayerStorage` of the layout.
        excluded_under: The key in the ``quantization_config`` whose value is the list of excluded modules.
    """

    storage: LayerStorage
    excluded_under: ClassVar[str] = "modules_to_not_convert"

    @abstractmethod
    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """Return a dictionary from the full name of each layer that has codes to the layer's quantization.

        Args:
            block: The ``quantization_config``.
            stored: A dictionary from the full name of each tensor in the checkpoint to its dtype and shape.

        Raises:
            ConfigError, CheckpointError, UnsupportedError: ``block`` cannot be used, or does not fit the
                stored tensors.
        """

    def cache(self, stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """Return a dictionary from the full name of a projection to the quantization of its cached output.

        The projections are those whose outputs are stored in the KV cache. The default implementation returns
        an empty dictionary, which means a float cache.

        Args:
            stored: A dictionary from the full name of each tensor in the checkpoint to its dtype and shape.
                Every attention module stores the scales of its keys and values, under names such as
                ``k_scale``.
        """
        return {}

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        """Implement `quark.checkpoint.LayoutReader.configuration`."""
        stored = {name: tensor for shard in check_shards(directory) for name, tensor in shard.tensors.items()}
        layers = self.layers(block, stored)
        if not layers:
            raise CheckpointError(
                f"'{directory}' holds no codes of the layout that its quantization_config names. Make or fetch the checkpoint again"
            )
        owners = {name.rpartition(".")[0] for name in stored}
        cache = self.cache(stored)
        listed = block.get(self.excluded_under)
        floats = (owners | stored.keys()) - layers.keys() - cache.keys()
        config = QConfig(
            global_quant_config=QLayerConfig(),
            layer_quant_config=by_pattern(layers, owners - layers.keys()),
            kv_cache_quant_config=by_pattern(cache, owners - cache.keys()),
            kv_cache_post_rope=True if cache else None,
            exclude=[name for name in listed if isinstance(name, str) and name in floats] if isinstance(listed, list) else [],
        )
        return StoredConfig(config=config)

    def prepare(self, model: nn.Module, stored: StoredConfig) -> QuantPlan:
        """Implement `quark.checkpoint.LayoutReader.prepare`."""
        pack_layer = partial(StoredLayer, storage=self.storage)
        return pack_model(model, stored.config, pack_layer=pack_layer, states_with_attention=True)


class StoredLayer(Packed):
    """A module that replaces a linear layer while a checkpoint is loaded.

    The stored tensors of the layer are buffers of the module. The `LayerStorage` defines their names. If the
    weight is not quantized, the module has a parameter ``weight`` instead of these buffers.

    Args:
        layer: The float layer. Its tensors are not used, and may be on any device.
        config: The quantization of the layer.
        name: Full name of the layer in its model, for messages.
        storage: Storage of the layout.
    """

    def __init__(self, layer: nn.Module, config: QLayerConfig, name: str, storage: LayerStorage) -> None:
        super().__init__()
        weight = linear_weight(layer)
        self._shape = tuple(weight.shape)
        self._config, self._name, self._storage = config, name, storage
        self._quantized = (quantized_class(layer).from_float(without_weights(layer), config),)  # in a tuple: not a submodule
        self._leaves: tuple[str, ...] = ()
        bias = getattr(layer, "bias", None)
        self.register_parameter("bias", None if bias is None else _empty(bias))
        if config.weight is None:
            self.register_parameter("weight", _empty(weight))
            return
        stored = meta_tensors(storage, config, self._shape)
        self._leaves = tuple(stored)
        for leaf, tensor in stored.items():
            self.register_buffer(leaf, torch.empty_like(tensor))

    def unpack(self) -> QuantizedLayer:
        """Return the quantized layer that the stored tensors describe, on the device of these tensors.

        Raises:
            CheckpointError: A scale is not valid.
        """
        return self._restored(keeps_tensors=False)

    def from_codes(self) -> QuantizedLayer:
        """Return a quantized layer whose weight stays packed in the form of the stored tensors.

        Raises:
            CheckpointError: A scale is not valid.
        """
        return self._restored(keeps_tensors=True)

    @torch.no_grad()
    def _restored(self, *, keeps_tensors: bool) -> QuantizedLayer:
        """Return the quantized layer. If ``keeps_tensors`` is True, the layer's weight stays packed."""
        layer = self._quantized[0]
        layer._parameters["bias"] = self._parameters["bias"]
        if self._config.weight is None:
            layer._parameters["weight"] = self._parameters["weight"]
            return layer.train(self.training)
        tensors = {leaf: self.get_buffer(leaf) for leaf in self._leaves}
        coded, dtype = self._storage.restored(self._config, self._shape, tensors), layer.weight.dtype
        if not keeps_tensors:
            coded.put_into(layer, self._name, keeps_codes=False)
            return layer.train(self.training)
        coded.set_input(layer, self._name)
        weight = PackedWeight(StoragePacking(self._storage, self._config), tensors, self._shape, dtype, self._name)  # type: ignore[arg-type]
        return runs_from_codes(layer, weight).train(self.training)

    def extra_repr(self) -> str:
        """Return a text for ``repr`` with the shape of the weight and the names of the stored tensors."""
        return f"weight {list(self._shape)}, stored as {', '.join(self._leaves) or 'weight'}"


@attrs.frozen
class StoragePacking:
    """A `quark.models.layers.packed_weight.WeightPacking` that packs a weight with a `LayerStorage`.

    Attributes:
        storage: Storage of the layout.
        config: The quantization of the layer.
    """

    storage: LayerStorage
    config: QLayerConfig = attrs.field(hash=False)

    @property
    def quantizer(self) -> TensorQuantizer:
        assert self.config.weight is not None
        return quantizer_for(self.config.weight, activation=False)

    def pack(self, codes: Tensor, qparams: QParams) -> dict[str, Tensor]:
        return self.storage.stored(CodedLayer(self.config, codes, qparams))

    def unpack(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, QParams]:
        coded = self.storage.restored(self.config, shape, tensors)
        return coded.codes, coded.qparams

    def qparams(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QParams:
        return self.unpack(tensors, shape)[1]


def by_pattern(layers: Mapping[str, QLayerConfig], others: Iterable[str]) -> dict[str, QLayerConfig]:
    """Replace full names of layers by patterns, and return a dictionary from pattern to configuration.

    Names that differ only in numbers are replaced by one pattern, if their configurations are equal and the
    pattern matches no other name. A model may have thousands of experts, and a look-up compares a name with
    one pattern after another, so fewer patterns save time.

    Args:
        layers: A dictionary from full name of a layer to its configuration.
        others: Names that no pattern may match.
    """
    families: dict[str, list[str]] = {}
    for name in layers:
        families.setdefault(without_numbers(name), []).append(name)
    elsewhere = {without_numbers(name) for name in others}
    result: dict[str, QLayerConfig] = {}
    for pattern, names in families.items():
        alike = all(layers[name] == layers[names[0]] for name in names)
        unique = not any(matches(name, pattern) for name in elsewhere | (families.keys() - {pattern}))
        result |= {pattern: layers[names[0]]} if alike and unique else {name: layers[name] for name in names}
    return result


def _empty(tensor: Tensor) -> nn.Parameter:
    """Return a parameter on the meta device with the shape and dtype of ``tensor``."""
    return nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
