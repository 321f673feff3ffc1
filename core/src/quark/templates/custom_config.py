"""QuantConfigParser: the ``quantization_config`` of a checkpoint as a QConfig, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.config.export import JsonExporterConfig
from quark.config.model import QConfig
from quark.errors import UnsupportedError

__all__ = ["QuantConfigParser"]

_OURS = "quark"


class QuantConfigParser:
    """The entry of transformers' loader for checkpoints in other producers' layouts, in AMD Quark's public API.

    Args:
        quant_config: A model's configuration.
        json_config: How it is exported.
    """

    def __init__(self, quant_config: QConfig, json_config: JsonExporterConfig | None = None) -> None:
        self.quant_config = quant_config
        self.json_config = json_config or JsonExporterConfig()

    @property
    def kv_cache_group(self) -> list[str]:
        """Patterns of the projections that feed the cache, as they are exported."""
        return self.json_config.kv_cache_group

    @property
    def output_quant(self) -> bool:
        """Whether the outputs of all layers are quantized."""
        return self.quant_config.global_quant_config.output_tensors is not None

    def get_custom_config(self) -> tuple[dict[str, Any], str]:
        """Return the ``quantization_config`` that another producer's layout wants, and its name: none and ``"quark"``."""
        return {}, _OURS

    @staticmethod
    def from_custom_config(quant_config: Mapping[str, Any], is_bias_quantized: bool = False) -> QConfig:
        """Read a ``quantization_config``.

        Args:
            quant_config: The block of ``config.json``; ``"quant_method"`` says whose it is.
            is_bias_quantized: Part of AMD Quark's signature; without effect.

        Raises:
            UnsupportedError: (a NotImplementedError) It is another producer's layout, which no part of this version reads.
            ConfigError: (a ValueError) It is damaged.
        """
        method = quant_config.get("quant_method", _OURS)
        if method != _OURS:
            raise UnsupportedError(
                f"a checkpoint with quant_method '{method}' cannot be read: this version reads '{_OURS}' only. "
                "Load it with the library that wrote it, or export it again in the default layout"
            )
        return QConfig.from_dict(quant_config)
