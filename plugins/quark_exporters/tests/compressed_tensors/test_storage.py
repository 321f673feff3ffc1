"""`CompressedTensorsStorage`: tensors of integer weights by the rules of compressed-tensors, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quark.checkpoint import CodedLayer
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import CheckpointError
from quark.numbers import quantizer_for
from quark_exporters.compressed_tensors.storage import CompressedTensorsStorage

ROWS, COLUMNS, GROUP = 16, 64, 32
COMMON: dict[str, Any] = {"is_dynamic": False, "scale_type": "float", "round_method": "half_even", "zero_point_type": "int32"}


def grouped(dtype: str, *, symmetric: bool) -> QLayerConfig:
    """Packed codes with a scale for each group."""
    spec = QTensorConfig(
        dtype=dtype, qscheme="per_group", ch_axis=-1, group_size=GROUP, symmetric=symmetric, observer_cls="PerGroupMinMaxObserver", **COMMON
    )
    return QLayerConfig(weight=spec)


def by_channel(dtype: str, *, symmetric: bool) -> QLayerConfig:
    """Codes of a byte with a scale for each row, beside dynamic inputs of the same type."""
    spec = QTensorConfig(
        dtype=dtype, qscheme="per_channel", ch_axis=0, symmetric=symmetric, observer_cls="PerChannelMinMaxObserver", **COMMON
    )
    inputs = QTensorConfig(
        dtype="int8" if "int" in dtype else dtype, qscheme="per_channel", ch_axis=1, symmetric=True, **{**COMMON, "is_dynamic": True}
    )
    return QLayerConfig(weight=spec, input_tensors=inputs)


def coded(config: QLayerConfig) -> CodedLayer:
    """A weight whose groups lie on one side of 0 or the other.

    So zero points differ and none is 0 by chance.
    """
    assert config.weight is not None
    quantizer = quantizer_for(config.weight, activation=False)
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) + torch.arange(-8.0, 8.0)[:, None] / 4
    qparams = quantizer.find_qparams(weight)
    return CodedLayer(config, quantizer.quantize(weight, qparams), qparams)


def nibbles(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes in int32 words, the first in the lowest bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(len(words), -1).astype(np.int64)


@pytest.mark.parametrize(
    "config",
    [
        grouped("int4", symmetric=False),
        grouped("uint4", symmetric=False),
        grouped("int8", symmetric=False),
        grouped("int4", symmetric=True),
    ],
    ids=["int4 with zero points", "uint4", "int8 with zero points", "int4"],
)
def test_packed_codes_and_zero_points_count_from_the_lowest_code(config: QLayerConfig) -> None:
    layer, storage = coded(config), CompressedTensorsStorage()
    assert storage.why_not(config, (ROWS, COLUMNS)) is None
    tensors = storage.stored(layer)
    quantizer = quantizer_for(config.weight, activation=False)
    bits = 8 if config.weight.dtype.name == "int8" else 4
    codes = nibbles(tensors["weight_packed"].numpy(), bits)[:, :COLUMNS]
    zeros = np.full((ROWS, COLUMNS // GROUP), 2 ** (bits - 1))
    if layer.qparams.zero_point is not None and not config.weight.symmetric:
        zeros = nibbles(tensors["weight_zero_point"].numpy().T.copy(), bits)[:, :ROWS].T
        assert len(np.unique(zeros)) > 3
    scales = tensors["weight_scale"].numpy()
    values = (codes - np.repeat(zeros, GROUP, axis=1)) * np.repeat(scales, GROUP, axis=1)
    assert np.array_equal(values.astype(np.float32), quantizer.dequantize(layer.codes, layer.qparams).numpy())
    again = storage.restored(config, (ROWS, COLUMNS), tensors)
    assert torch.equal(quantizer.dequantize(again.codes, again.qparams), quantizer.dequantize(layer.codes, layer.qparams))
    assert again.codes.dtype is layer.codes.dtype


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_codes_and_zero_points_of_a_byte_are_signed(dtype: str) -> None:
    config = by_channel(dtype, symmetric=False)
    layer, storage = coded(config), CompressedTensorsStorage()
    tensors = storage.stored(layer)
    quantizer = quantizer_for(config.weight, activation=False)
    assert {tensors[name].dtype for name in ("weight", "weight_zero_point")} == {torch.int8}
    assert tensors["weight"].shape == (ROWS, COLUMNS)
    assert tensors["weight_scale"].shape == tensors["weight_zero_point"].shape == (ROWS, 1)
    assert len(tensors["weight_zero_point"].unique()) > 3
    values = (tensors["weight"].double() - tensors["weight_zero_point"].double()) * tensors["weight_scale"].double()
    assert torch.equal(values.float(), quantizer.dequantize(layer.codes, layer.qparams))
    again = storage.restored(config, (ROWS, COLUMNS), tensors)
    assert torch.equal(again.codes, layer.codes)
    assert torch.equal(again.qparams.zero_point, layer.qparams.zero_point)


def test_scales_that_are_stored_in_16_bits_are_float32_when_they_are_read() -> None:
    config, storage = by_channel("fp8_e4m3", symmetric=True), CompressedTensorsStorage()
    tensors = storage.stored(coded(config))
    again = storage.restored(config, (ROWS, COLUMNS), tensors | {"weight_scale": tensors["weight_scale"].bfloat16()})
    assert again.qparams.scale.dtype is torch.float32
    assert torch.equal(again.qparams.scale, tensors["weight_scale"].bfloat16().float().reshape(again.qparams.scale.shape))


def test_a_stored_shape_is_that_of_the_weight_and_another_one_is_damage() -> None:
    config, storage = grouped("int4", symmetric=True), CompressedTensorsStorage()
    tensors = storage.stored(coded(config))
    assert tensors["weight_shape"].tolist() == [ROWS, COLUMNS]
    with pytest.raises(CheckpointError, match=r"'weight_shape' is \[16, 64\] for a weight of shape \[16, 32\]"):
        storage.restored(config, (ROWS, COLUMNS // 2), tensors)
