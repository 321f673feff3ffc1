"""QuarkReader: checkpoints of the Quark layout, whoever wrote them. The other side of `quark_exporters.quark_layout.exporter`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from quark.checkpoint.layout_reader import StoredConfig
from quark.checkpoint.packed_model import pack_model
from quark.hf.shards import check_shards
from quark.log import get_logger
from quark.modules.packed_layers import PackedLayer
from quark.planning.plan import QuantPlan, has_static_scale
from quark_exporters.quark_layout.quantization_config import read_quantization_config
from quark_exporters.quark_layout.tensor_names import attention_attribute, has_probabilities, packed_attribute

__all__ = ["QuarkReader"]


class QuarkReader:
    """Reads the Quark layout, as `quark.checkpoint.LayoutReader`."""

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        """As `quark.checkpoint.LayoutReader.configuration`."""
        stored = read_quantization_config(block)
        config = stored.config
        if has_static_scale(config.softmax_quant_spec) and not any(has_probabilities(shard.tensors) for shard in check_shards(directory)):
            # Such exports are made where the scales cannot be found, and say so in no other way.
            get_logger(__name__).warning(f"'{directory}' holds no scales of attention probabilities: they stay float")
            return attrs.evolve(stored, config=attrs.evolve(config, softmax_quant_spec=None))
        return stored

    def prepare(self, model: nn.Module, stored: StoredConfig) -> QuantPlan:
        """As `quark.checkpoint.LayoutReader.prepare`."""
        return pack_model(model, stored.config, stored.pack_method)

    def place_of(self, model: nn.Module, name: str) -> str:
        """As `quark.checkpoint.LayoutReader.place_of`."""
        owner, _, leaf = name.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            return name
        attribute = packed_attribute(leaf) if isinstance(module, PackedLayer) else attention_attribute(leaf)
        return f"{owner}.{attribute}" if owner else attribute
