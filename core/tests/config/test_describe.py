"""Descriptions of a tensor's quantization in words and metrics."""

from __future__ import annotations

from typing import Any

import pytest

from quark.config.describe import describe_activation, describe_layer, describe_spec, effective_bits, needs_calibration
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig

BITS = {"int4": 4.0, "uint4": 4.0, "fp4": 4.0, "fp8_e4m3": 8.0, "bfloat16": 16.0}


def group(dtype: str = "int4", size: int = 128, **more: Any) -> QTensorConfig:
    return QTensorConfig(dtype=dtype, qscheme="per_group", ch_axis=-1, group_size=size, **more)


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        (None, None),
        (QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor"), 8),
        (QTensorConfig(dtype="int4", qscheme="per_channel", ch_axis=0), 4),
        (group(size=128), 4.25),
        (group(size=-1), 4),
        (group(size=32, scale_type="float16"), 4.5),
        (group("uint4", 32, symmetric=False), 4 + 36 / 32),
        (group("fp4", 32, scale_format="e8m0"), 4.25),
        (group("mx", 32, mx_element_dtype="fp4", scale_format="e8m0"), 4.25),
        (QTensorConfig(dtype="fp8_e4m3", qscheme="per_block", block_size=(128, 128)), 8 + 32 / 16384),
        ((group("fp4", 16), QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_scale_quant=True)), 4.5),
        ((QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor"), QTensorConfig(dtype="int4", qscheme="per_channel", ch_axis=0)), 4),
    ],
)
def test_effective_bits_count_the_scales_of_groups_and_blocks(spec: Any, bits: float | None) -> None:
    assert effective_bits(spec, BITS.__getitem__) == bits


def test_a_layer_in_words() -> None:
    layer = QLayerConfig(
        weight=group(symmetric=False),
        input_tensors=QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=True),
        bias=QTensorConfig(dtype="bfloat16"),
    )
    assert describe_layer(layer) == "W int4/group 128 asym, in fp8_e4m3/tensor dynamic, bias bfloat16"
    assert describe_layer(None) == describe_spec(None) == "float"


@pytest.mark.parametrize(
    ("activation", "needed"),
    [
        (None, False),
        (QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=True), False),
        (QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=False), True),
        (QTensorConfig(dtype="bfloat16", is_dynamic=False), False),
    ],
)
def test_static_activations_with_scales_need_calibration(activation: Any, needed: bool) -> None:
    assert needs_calibration(QLayerConfig(weight=group(), input_tensors=activation)) is needed
    assert needs_calibration(QLayerConfig(weight=group(), output_tensors=activation)) is needed


def test_what_is_not_quantized_is_float() -> None:
    assert describe_activation(None) == "float"
    assert describe_spec(None) == "float"
