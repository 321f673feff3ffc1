"""``quark.torch.export.main_export.quant_config_parser``: which quantization a layer gets, and configurations of other producers."""

from __future__ import annotations

from torch import nn

from quark.model.resolve import layer_config_for
from quark.specs.layer import QLayerConfig
from quark.specs.model import QConfig
from quark.templates.custom_config import QuantConfigParser

__all__ = ["QuantConfigParser", "get_layer_quant_config"]


def get_layer_quant_config(quant_config: QConfig, layer_type: type[nn.Module], layer_name: str) -> QLayerConfig | None:
    """What the layer ``layer_name`` gets, None where it stays float: `quark.model.resolve.layer_config_for` in the documented order."""
    return layer_config_for(quant_config, layer_name, layer_type).config
