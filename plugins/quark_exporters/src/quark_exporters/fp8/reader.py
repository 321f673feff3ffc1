"""Fp8Reader: checkpoints with FP8 weights in the layout of DeepSeek-V3, whoever wrote them, as quantized models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.config.layer import QLayerConfig
from quark_exporters.fp8.scheme import layer_config
from quark_exporters.fp8.storage import Fp8Storage
from quark_exporters.linear_layers import LinearReader

__all__ = ["Fp8Reader"]


class Fp8Reader(LinearReader):
    """Reads FP8 weights, as `quark.checkpoint.LayoutReader`."""

    storage = Fp8Storage()

    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """As `quark.checkpoint.StorageReader.layers`."""
        config = layer_config(block)
        scales = (".weight_scale", ".weight_scale_inv")
        names = [name.removesuffix(suffix) for name in stored for suffix in scales if name.endswith(suffix)]
        return dict.fromkeys((name for name in names if f"{name}.weight" in stored), config)

    def layer_config(self, block: Mapping[str, Any]) -> QLayerConfig:
        """As `quark.checkpoint.layout_reader.ReadsBlocks.layer_config`."""
        return layer_config(block)
