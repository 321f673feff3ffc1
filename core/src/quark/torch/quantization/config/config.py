"""``quark.torch.quantization.config.config``: configuration of every generation; ``*Spec`` and algorithm classes come from plugins."""

from __future__ import annotations

from typing import Any

from quark.compat.facade import Facade
from quark.config.algorithm import AlgoConfig as AlgoConfig
from quark.config.layer import QLayerConfig as QLayerConfig
from quark.config.model import QConfig as QConfig
from quark.config.tensor import QTensorConfig as QTensorConfig
from quark.templates import load_quant_algo_config_from_file as load_quant_algo_config_from_file

Config = QConfig
QuantizationConfig = QLayerConfig
QuantizationSpec = QTensorConfig
PreQuantOptConfig = AlgoConfig
load_pre_optimization_config_from_file = load_quant_algo_config_from_file

_FACADE = Facade(
    __name__,
    own=(
        "AlgoConfig",
        "Config",
        "PreQuantOptConfig",
        "QConfig",
        "QLayerConfig",
        "QTensorConfig",
        "QuantizationConfig",
        "QuantizationSpec",
        "load_pre_optimization_config_from_file",
        "load_quant_algo_config_from_file",
    ),
    plugins=True,
)


def __getattr__(name: str) -> Any:
    return _FACADE.load(name)


def __dir__() -> list[str]:
    return _FACADE.names()
