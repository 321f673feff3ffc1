"""AMD Quark's module ``quant_config_parser``.

It returns the configuration of a layer, and reads the configurations of checkpoints that other tools have
written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from quark.checkpoint.layout_reader import layout_for, reader_of
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import CheckpointError, ConfigError, UnsupportedError
from quark.models.plan.rules import layer_config_for
from quark_amd.export_config import JsonExporterConfig

__all__ = ["QuantConfigParser", "get_layer_quant_config"]

_OURS = "quark"
_EXCLUDED = ("ignored_layers", "modules_to_not_convert")
_CACHE = QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", observer_cls="PerTensorMinMaxObserver", is_dynamic=False)


def get_layer_quant_config(quant_config: QConfig, layer_type: type[nn.Module], layer_name: str) -> QLayerConfig | None:
    """Return the configuration of the layer ``layer_name``, or None if the layer is not quantized.

    This function calls `quark.models.plan.rules.layer_config_for`.
    """
    return layer_config_for(quant_config, layer_name, layer_type).config


class QuantConfigParser:
    """AMD Quark's class that reads the ``quantization_config`` that another tool has written for
    transformers.

    Args:
        quant_config: The configuration of a model.
        json_config: Options of the export.
    """

    def __init__(self, quant_config: QConfig, json_config: JsonExporterConfig | None = None) -> None:
        self.quant_config = quant_config
        self.json_config = json_config or JsonExporterConfig()

    @property
    def kv_cache_group(self) -> list[str]:
        """Patterns for the names of the projections whose outputs are stored in the KV cache."""
        return self.json_config.kv_cache_group

    @property
    def output_quant(self) -> bool:
        """Whether the outputs of all layers are quantized."""
        return self.quant_config.global_quant_config.output_tensors is not None

    def get_custom_config(self) -> tuple[dict[str, Any], str]:
        """Return an empty dictionary and ``"quark"``.

        In AMD Quark, the dictionary may be the ``quantization_config`` of another tool.
        """
        return {}, _OURS

    @staticmethod
    def from_custom_config(
        quant_config: Mapping[str, Any],
        is_bias_quantized: bool = False,
        is_kv_cache: bool = False,
        kv_layers_name: Sequence[str] | None = None,
    ) -> QConfig:
        """Read the ``quantization_config`` of a checkpoint that this project or another tool has written.

        A layout of another tool, such as ``fp8`` or ``awq``, must quantize all layers in the same way.

        Args:
            quant_config: The ``quantization_config`` of ``config.json``. The value of ``"quant_method"`` is
                the name of the tool.
            is_bias_quantized: Whether biases are quantized like weights. Other tools do not store this
                information.
            is_kv_cache: Whether the KV cache is stored in FP8 with one scale. Other tools do not store this
                information.
            kv_layers_name: Patterns for the names of the projections whose outputs are stored in the KV
                cache.

        Raises:
            UnsupportedError: (a NotImplementedError) The ``quantization_config`` does not state how each
                layer is quantized, or no installed plugin reads this layout.
            ConfigError: (a ValueError) ``quant_config`` is damaged, or ``kv_layers_name`` is missing although
                ``is_kv_cache`` is True.
        """
        method = quant_config.get("quant_method", _OURS)
        if method == _OURS:
            return QConfig.from_dict(quant_config)
        try:
            reader = reader_of(layout_for(quant_config, Path("config.json")))
        except CheckpointError as error:
            raise UnsupportedError(f"a checkpoint with quant_method '{method}' cannot be read: {error}") from error
        layer = reader.layer_config(quant_config)
        if layer is None:
            raise UnsupportedError(
                f"a quantization_config with quant_method '{method}' does not state how each layer is quantized. Load the whole checkpoint "
                f"with import_model_from_safetensors"
            )
        if is_kv_cache and not kv_layers_name:
            raise ConfigError("is_kv_cache=True needs kv_layers_name. Give patterns such as ['*k_proj', '*v_proj']")
        if is_bias_quantized:
            layer = attrs.evolve(layer, bias=layer.weight)
        cached = {name: attrs.evolve(layer, output_tensors=_CACHE) for name in kv_layers_name or ()} if is_kv_cache else {}
        excluded = [str(name) for key in _EXCLUDED for name in quant_config.get(key) or ()]
        return QConfig(layer, exclude=list(dict.fromkeys(excluded)), layer_quant_config=cached, kv_cache_quant_config=dict(cached))
