# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.config.layer import QLayerConfig as QLayerConfig
from quark.config.model import QConfig as QConfig
from quark.config.tensor import QTensorConfig as QTensorConfig
from quark_amd.algorithm_settings import load_quant_algo_config_from_file as load_quant_algo_config_from_file
from typing import Any
from quark.torch._names_of_plugins import *
Config = QConfig
QuantizationConfig = QLayerConfig
QuantizationSpec = QTensorConfig
load_pre_optimization_config_from_file = load_quant_algo_config_from_file
def __getattr__(name: str) -> Any: ...  # names of other plugins
