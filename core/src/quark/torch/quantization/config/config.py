"""``quark.torch.quantization.config.config``: configuration of every generation; ``*Spec`` and algorithm classes come from plugins."""

from __future__ import annotations

from typing import Any

from quark.config.algorithm import AlgoConfig as AlgoConfig
from quark.config.layer import QLayerConfig as QLayerConfig
from quark.config.model import QConfig as QConfig
from quark.config.tensor import QTensorConfig as QTensorConfig
from quark.templates import load_quant_algo_config_from_file as load_quant_algo_config_from_file
from quark.torch.documented import documented_name, documented_names

Config = QConfig
QuantizationConfig = QLayerConfig
QuantizationSpec = QTensorConfig
PreQuantOptConfig = AlgoConfig
load_pre_optimization_config_from_file = load_quant_algo_config_from_file


def __getattr__(name: str) -> Any:
    return documented_name(__name__, name, {}, plugins=True)


def __dir__() -> list[str]:
    return documented_names(__name__, {}, plugins=True)
