"""``quark.torch.quantization.config.algo_configs``: the settings that algorithms derive for model families."""

from __future__ import annotations

from quark.templates import get_algo_config, get_supported_algorithm_types

__all__ = ["get_algo_config", "get_supported_algorithm_types"]
