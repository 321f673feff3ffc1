"""The box layout: safetensors files with ``NAME.box_codes`` and ``NAME.box_scale`` of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from quark.checkpoint import CheckpointContent, CheckpointExporter, ExportOptions, LayoutReader, StoredConfig
from quark.config.layer import Slot
from quark.config.model import QConfig
from quark.errors import UnsupportedError
from quark.models.layers import QuantizedLayer, QuantizerModule

METHOD = "third-party-box"


class BoxExporter(CheckpointExporter):
    """Writes the layout."""

    layout = "box"

    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
        if options.weight_format != "real_quantized":
            raise UnsupportedError("the box layout holds codes: choose weight_format='real_quantized'")
        for name, layer in skeleton.named_modules():
            if isinstance(layer, QuantizedLayer) and (
                layer.weight_quantizer is None or layer.input_quantizer is not None or layer.output_quantizer is not None
            ):
                raise UnsupportedError(f"the box layout stores only quantized weights: '{name}' has others. Choose another layout")
            if isinstance(layer, QuantizerModule) and layer.qparams is not None and not name.endswith(".weight_quantizer"):
                raise UnsupportedError(f"the box layout stores only scales of weights, and none of '{name}'. Choose another layout")

    def tensor_name(self, slot: Slot, suffix: str) -> str:
        return f"box_{suffix or 'codes'}" if slot is Slot.weight else super().tensor_name(slot, suffix)

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        return {**content.config.to_dict(), "quant_method": METHOD, "order": options.pack_method}


class BoxReader(LayoutReader):
    """Reads the box layout, with core's modules for packed layers."""

    renamings = ((r"\.box_codes$", ".weight"), (r"\.box_(\w+)$", r".weight_quantizer.\1"))

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        return StoredConfig(config=QConfig.from_dict(block), pack_method=str(block.get("order", "reorder")))

    def place_of(self, model: nn.Module, name: str) -> str:
        owner, _, suffix = name.rpartition(".box_")
        if not owner or suffix == "codes":
            return f"{owner}.weight" if owner else name
        return f"{owner}.{Slot.weight.quantizer_attribute}.{suffix}"
