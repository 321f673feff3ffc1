"""Codes and scales of integers and small floats come back from their packing.

They lie in a checkpoint where readers look for them.
"""

import attrs
import pytest
import torch

from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, PerChannel, PerGroup, QParams, number_format


def spec(name: str) -> QTensorConfig:
    return QTensorConfig(dtype=name, qscheme="per_tensor", is_dynamic=False, symmetric=True)


@pytest.mark.parametrize("name", ["int8", "uint8", "int16"])
def test_grouped_integers_of_whole_bytes_lie_transposed_and_others_as_they_are(name: str) -> None:
    fmt = number_format(name)
    codes = torch.arange(6 * 16).reshape(6, 16).to(fmt.storage_dtype)
    grouped = fmt.packing.pack(codes, PerGroup(8), "reorder")
    assert torch.equal(grouped, codes.t())
    assert torch.equal(fmt.packing.unpack(grouped, PerGroup(8), "reorder", (6, 16)), codes)
    assert torch.equal(fmt.packing.pack(codes, PerChannel(0), "reorder"), codes)
    scale = torch.arange(12.0).reshape(6, 2)
    assert torch.equal(fmt.packing.pack_qparams(QParams(scale), spec(name), PerGroup(8), "reorder")["scale"], scale.t())


@pytest.mark.parametrize(("order", "word"), [("order", 0x76543210), ("reorder", 0x75316420)])
@pytest.mark.parametrize("granularity", [PerChannel(0), PerGroup(16)], ids=repr)
def test_zero_points_are_packed_along_the_outputs_in_the_order_asked_for(granularity: Granularity, order: str, word: int) -> None:
    fmt, asymmetric = number_format("uint4"), attrs.evolve(spec("uint4"), symmetric=False)
    zero = torch.arange(8, dtype=torch.int32).reshape(granularity.scale_shape((8, 16)))
    stored = fmt.packing.pack_qparams(QParams(torch.ones(zero.shape), zero), asymmetric, granularity, order)
    assert stored["zero_point"].flatten().tolist() == [word]
    again = fmt.packing.unpack_qparams(stored, asymmetric, granularity, order, (8, 16)).zero_point
    assert again is not None
    assert torch.equal(again, zero)
