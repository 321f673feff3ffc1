"""Groups along the first axis of a weight: those along the last axis of its transpose."""

from typing import Any

import pytest
import torch

import quark
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.numbers import PerGroupOfRows, TensorQuantizer, WeightGrid, number_format, quantizer_for
from quark.numbers.self_check import refuse_broken
from quark_schemes.formats.block_float import Microexponent

FIELDS: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in quark.formats().names()
        if name not in ("mx", "fp8_e8m0", "fp8_e5m3") and not number_format(name).is_cast and number_format(name).vector == 1
    },
    "uint4 asymmetric": {"dtype": "uint4", "symmetric": False},
    "int8 searched": {"dtype": "int8", "observer_cls": "PerGroupMSEObserver"},
    "fp4 e8m0": {"dtype": "fp4", "scale_format": "e8m0"},
    "fp8 e8m0": {"dtype": "fp8_e4m3", "scale_format": "e8m0"},
    "mxint8": {"dtype": "mx", "mx_element_dtype": "int8"},
}


def quantizer_of(name: str, axis: int, **more: Any) -> TensorQuantizer:
    usual = {"dtype": name, "qscheme": "per_group", "ch_axis": axis, "group_size": 32, "symmetric": True, "is_dynamic": False}
    return quantizer_for(QTensorConfig(**usual | FIELDS[name] | more), activation=False)


@pytest.mark.parametrize("name", FIELDS)
def test_values_scales_and_codes_are_those_of_the_transpose_and_survive_packing(name: str) -> None:
    quantizer, other = quantizer_of(name, 0), quantizer_of(name, -1)
    if isinstance(quantizer.stored_level.format, Microexponent):
        assert "along the last axis: use ch_axis=-1, not 0" in (quantizer.shape_error((64, 64)) or "")
        return
    assert quantizer.granularity == PerGroupOfRows(32)
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(0))
    assert "groups of 32 (ch_axis=0)" in (quantizer.shape_error((48, 24)) or "")
    assert quantizer.shape_error((64, 24)) is None
    refuse_broken(quantizer, activation=False)
    (values, qparams), (turned, expected) = quantizer.round_to_nearest(x), other.round_to_nearest(x.t().contiguous())
    assert torch.equal(values, turned.t())
    assert torch.equal(qparams.scale, expected.scale)
    codes = quantizer.quantize(x, qparams)
    again, stored = quantizer.unpack(quantizer.pack(codes, qparams), (64, 24))
    assert torch.equal(quantizer.dequantize(again, stored), values)


@pytest.mark.parametrize("name", ["int8", "uint4 asymmetric", "fp4 e8m0"])
def test_the_grid_of_algorithms_has_the_same_scales(name: str) -> None:
    quantizer = quantizer_of(name, 0)
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
    grid = WeightGrid([quantizer], [64], x.t().contiguous())
    assert grid.fixed is not None
    ((values, qparams, _),) = grid.weights(grid.round_(x.t().contiguous(), grid.fixed), grid.fixed)
    expected, scales = quantizer.round_to_nearest(x)
    assert torch.equal(values, expected)
    assert torch.equal(qparams.scale, scales.scale)


@pytest.mark.parametrize(("axis", "size", "activation"), [(0, 32, True), (0, -1, False), (2, 32, False)])
def test_groups_along_other_axes_are_refused_by_their_setting(axis: int, size: int, activation: bool) -> None:
    spec = QTensorConfig(dtype="int8", qscheme="per_group", ch_axis=axis, group_size=size, symmetric=True, is_dynamic=False)
    with pytest.raises(
        ConfigError, match=f"cannot run along ch_axis={axis} of {'an activation' if activation else 'a weight'}. Set ch_axis=-1"
    ):
        quantizer_for(spec, activation=activation)
