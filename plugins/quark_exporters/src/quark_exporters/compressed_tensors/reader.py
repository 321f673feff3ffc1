"""CompressedTensorsReader: checkpoints of compressed-tensors, whoever wrote them, as quantized models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quark.config.layer import QLayerConfig
from quark_exporters.compressed_tensors.arguments import layer_config
from quark_exporters.compressed_tensors.scheme import refuse_other_transforms
from quark_exporters.compressed_tensors.storage import CompressedTensorsStorage
from quark_exporters.linear_layers import LinearReader

__all__ = ["CompressedTensorsReader"]


class CompressedTensorsReader(LinearReader):
    """Reads the layout of compressed-tensors, as `quark.checkpoint.LayoutReader`."""

    storage = CompressedTensorsStorage()

    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """As `quark.checkpoint.StorageReader.layers`."""
        refuse_other_transforms(block)
        return {name: layer_config(block, name, stored) for name in _names(stored)}


def _names(stored: Mapping[str, Any]) -> Iterator[str]:
    for name in stored:
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight_packed" or (leaf == "weight" and f"{layer}.weight_scale" in stored):
            yield layer
