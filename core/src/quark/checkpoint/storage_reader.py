"""StorageReader: base of readers of layouts whose layers are stored by a `quark.checkpoint.layer_storage.LayerStorage`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from quark.checkpoint.layer_storage import LayerStorage
from quark.checkpoint.layout_reader import StoredConfig
from quark.checkpoint.packed_model import pack_model
from quark.checkpoint.stored_layer import StoredLayer
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import CheckpointError
from quark.hf.shards import check_shards
from quark.names import matches, without_numbers
from quark.planning.plan import QuantPlan

__all__ = ["StorageReader", "by_pattern"]

_CACHED = {"k_scale": ("k_proj", "qkv_proj"), "v_scale": ("v_proj", "qkv_proj")}
"""Scale of an attention module → the projections beside it that can give what it is the scale of."""


class StorageReader(ABC):
    """Reads a layout, as `quark.checkpoint.LayoutReader`: which layers have codes is taken from the files, how from the configuration.

    Attributes:
        storage: How the tensors of a layer are stored.
    """

    storage: LayerStorage

    @abstractmethod
    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """Return how each layer with codes is quantized.

        Args:
            block: The ``quantization_config``.
            stored: Dtype and shape of each tensor of the checkpoint, by full name.

        Raises:
            ConfigError, CheckpointError, UnsupportedError: The block cannot be used, or does not fit the files.
        """

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        """As `quark.checkpoint.LayoutReader.configuration`."""
        stored = {name: tensor for shard in check_shards(directory) for name, tensor in shard.tensors.items()}
        layers = self.layers(block, stored)
        if not layers:
            raise CheckpointError(f"'{directory}' holds no codes of the layout that its quantization_config names: it is damaged")
        owners = {name.rpartition(".")[0] for name in stored}
        cache = {
            f"{attention}.{projection}": QLayerConfig(output_tensors=_cache_spec())
            for attention, _, leaf in (name.rpartition(".") for name in stored)
            for projection in _CACHED.get(leaf, ())
            if f"{attention}.{projection}" in owners
        }
        config = QConfig(
            global_quant_config=QLayerConfig(),
            layer_quant_config=by_pattern(layers, owners - layers.keys()),
            kv_cache_quant_config=by_pattern(cache, owners - cache.keys()),
            kv_cache_post_rope=True if cache else None,
        )
        return StoredConfig(config=config)

    def prepare(self, model: nn.Module, stored: StoredConfig) -> QuantPlan:
        """As `quark.checkpoint.LayoutReader.prepare`."""
        pack_layer = partial(StoredLayer, storage=self.storage)
        return pack_model(model, stored.config, pack_layer=pack_layer, states_with_attention=True)

    def place_of(self, model: nn.Module, name: str) -> str:
        """As `quark.checkpoint.LayoutReader.place_of`: tensors have the names of their places."""
        return name


def by_pattern(layers: Mapping[str, QLayerConfig], others: Iterable[str]) -> dict[str, QLayerConfig]:
    """Return the configurations of layers with one pattern for names that differ in numbers alone, where that matches nothing else.

    A model has thousands of experts, and configurations are searched from the top.

    Args:
        layers: By full name.
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


def _cache_spec() -> QTensorConfig:
    fields: dict[str, Any] = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True, "is_dynamic": False, "scale_type": "float"}
    return QTensorConfig(**fields, observer_cls="PerTensorMinMaxObserver", round_method="half_even", zero_point_type="int32")
