"""LayerStorage: how a layout names and packs the tensors of a quantized linear layer, and back.

Writing and reading use the same object. A layout that packs codes differently from their number formats
(``qweight``, ``weight_packed``, …) implements `LayerStorage`; `quark.checkpoint.CheckpointExporter` and
`StorageReader` do the rest, for whole models. While a checkpoint is loaded, a `StoredLayer` holds the tensors
of each layer, and becomes the quantized layer.
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
    """Names and packs the tensors of a quantized linear layer.

    All methods are pure functions of their arguments.
    """

    def __hash__(self) -> int: ...

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        """Return why a layer of that configuration and weight shape cannot be stored; None if it can."""

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        """Return the tensors to store for a layer that `why_not` accepts, by the last part of their names.

        This works on meta tensors.
        """

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        """Undo `stored`, for a layer with a weight of that shape."""


def layer_codes(
    layer: str, config: QLayerConfig, shape: tuple[int, ...], storage: LayerStorage, names: Mapping[str, str]
) -> tuple[LayerCodes, ...]:
    """Return the `LayerCodes` for writing a stored layer again; none if its static input has no stored scale.

    Args:
        layer: Its full name.
        config: Its quantization.
        shape: Shape of its weight.
        storage: Storage of the layout.
        names: Full name of each of its stored tensors, by its name in ``storage``.
    """
    inputs = None if config.input_tensors is None else quantizer_for(config.input_tensors, activation=True)
    if inputs is not None and not inputs.is_dynamic and not any(leaf.startswith("input_") for leaf in names):
        return ()

    def read(tensors: Mapping[str, Tensor]) -> CodedLayer:
        return storage.restored(config, shape, {leaf: tensors[name] for leaf, name in names.items()})

    return (LayerCodes(name=layer, config=config, shape=shape, read=read),)


def meta_tensors(storage: LayerStorage, config: QLayerConfig, shape: tuple[int, ...]) -> Mapping[str, Tensor]:
    """Return the stored tensors of a layer with a weight of that shape, by name, on the meta device.

    Layers of one shape share them.
    """
    return _on_meta(storage, _key(config.weight), _key(config.input_tensors), shape)


def _key(spec: TensorSpec | None) -> TensorSpec | None:
    """Return a spec that can be a key of a cache."""
    return tuple(spec) if isinstance(spec, list) else spec


# Operations on meta tensors are slow, and a model has few kinds of layers.
@lru_cache(maxsize=1024)
def _on_meta(storage: LayerStorage, weight: TensorSpec, inputs: TensorSpec | None, shape: tuple[int, ...]) -> Mapping[str, Tensor]:
    return storage.stored(CodedLayer.empty(QLayerConfig(weight=weight, input_tensors=inputs), shape))


class StorageReader(LayoutReader):
    """Reads a layout whose layers a `LayerStorage` packs.

    The files show which layers have codes, and the configuration shows the form of the codes.

    Attributes:
        storage: Storage of the tensors of a layer.
        excluded_under: Key of the ``quantization_config`` that lists excluded modules.
    """

    storage: LayerStorage
    excluded_under: ClassVar[str] = "modules_to_not_convert"

    @abstractmethod
    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """Return the quantization of each layer with codes, by full name.

        Args:
            block: The ``quantization_config``.
            stored: Dtype and shape of each tensor of the checkpoint, by full name.

        Raises:
            ConfigError, CheckpointError, UnsupportedError: The block cannot be used, or does not fit the
                files.
        """

    def cache(self, stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """Return the quantization of the projections whose outputs attention caches, by full name.

        By default, the cache is float.

        Args:
            stored: As in `layers`. Scales of keys and values are stored with every attention module, as
                ``k_scale``.
        """
        return {}

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        """As `quark.checkpoint.LayoutReader.configuration`."""
        stored = {name: tensor for shard in check_shards(directory) for name, tensor in shard.tensors.items()}
        layers = self.layers(block, stored)
        if not layers:
            raise CheckpointError(f"'{directory}' holds no codes of the layout that its quantization_config names: fetch or make it again")
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
        """As `quark.checkpoint.LayoutReader.prepare`."""
        pack_layer = partial(StoredLayer, storage=self.storage)
        return pack_model(model, stored.config, pack_layer=pack_layer, states_with_attention=True)


class StoredLayer(Packed):
    """A linear layer with the tensors of a `LayerStorage`, under their stored names.

    If the weight is not quantized, the layer has the float weight.

    Args:
        layer: The float layer; its tensors may be on any device and are not used.
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
        """Return the quantized layer of the stored tensors, on their device.

        Raises:
            CheckpointError: A scale is not valid.
        """
        return self._restored(keeps_tensors=False)

    def from_codes(self) -> QuantizedLayer:
        """Return a quantized layer that keeps the stored tensors of its weight.

        Raises:
            CheckpointError: A scale is not valid.
        """
        return self._restored(keeps_tensors=True)

    @torch.no_grad()
    def _restored(self, *, keeps_tensors: bool) -> QuantizedLayer:
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
        """Return the shape of the weight and the names of the stored tensors, for ``repr``."""
        return f"weight {list(self._shape)}, stored as {', '.join(self._leaves) or 'weight'}"


@attrs.frozen
class StoragePacking:
    """Packs a weight with a `LayerStorage`, as a `quark.models.layers.packed_weight.WeightPacking`.

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
    """Return the configurations of layers, with one pattern for names that differ only in numbers.

    A pattern matches nothing else. A model has thousands of experts, and configurations are searched from the
    top.

    Args:
        layers: Configurations by full name.
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
    return nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
