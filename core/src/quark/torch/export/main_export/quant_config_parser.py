"""``quark.torch.export.main_export.quant_config_parser``: which quantization a layer gets, and configurations of other producers."""

from __future__ import annotations

from torch import nn

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.planning.precedence import layer_config_for
from quark.templates.custom_config import QuantConfigParser

__all__ = ["QuantConfigParser", "get_layer_quant_config"]


def get_layer_quant_config(quant_config: QConfig, layer_type: type[nn.Module], layer_name: str) -> QLayerConfig | None:
    """Return the configuration of the layer ``layer_name``, None where it stays float (`quark.planning.precedence.layer_config_for`)."""
    return layer_config_for(quant_config, layer_name, layer_type).config
