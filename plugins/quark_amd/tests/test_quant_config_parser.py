"""AMD Quark's reader of a quantization_config, for configurations of several producers."""

from __future__ import annotations

import pytest

from quark.errors import ConfigError
from quark.torch.export.main_export.quant_config_parser import QuantConfigParser

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def test_a_checkpoint_of_another_producer_is_refused_and_ours_is_read() -> None:
    ours = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8"}}}
    assert QuantConfigParser.from_custom_config(ours, is_bias_quantized=False).global_quant_config.weight is not None
    with pytest.raises(NotImplementedError, match="quant_method 'other'"):
        QuantConfigParser.from_custom_config({"quant_method": "other"})


def test_the_documented_arguments_are_taken() -> None:
    config = QuantConfigParser.from_custom_config(AWQ, is_bias_quantized=False, is_kv_cache=False, kv_layers_name=None)
    weight = config.global_quant_config.weight
    assert (weight.dtype.name, weight.group_size, weight.symmetric) == ("uint4", 128, False)  # type: ignore[union-attr]


def test_a_cache_and_biases_are_what_the_caller_says() -> None:
    config = QuantConfigParser.from_custom_config(FP8, is_bias_quantized=True, is_kv_cache=True, kv_layers_name=["*k_proj", "*v_proj"])
    assert "lm_head" in config.exclude
    assert config.global_quant_config.bias == config.global_quant_config.weight
    assert config.global_quant_config.output_tensors is None
    assert list(config.kv_cache_quant_config) == ["*k_proj", "*v_proj"]
    outputs = [layer.output_tensors for layer in config.layer_quant_config.values()]
    assert [spec.dtype.name for spec in outputs] == ["fp8_e4m3", "fp8_e4m3"]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="needs kv_layers_name"):
        QuantConfigParser.from_custom_config(FP8, is_kv_cache=True)
