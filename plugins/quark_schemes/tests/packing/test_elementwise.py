"""Codes and scales of integers and small floats come back from their packing, and lie in a checkpoint where readers look for them."""

from typing import Any

import attrs
import pytest
import torch

import quark
from quark.config.tensor import QTensorConfig
from quark.quantizers import Granularity, PerChannel, PerGroup, PerTensor, QParams, number_format
from quark_schemes.formats.integer import IntegerFormat
from quark_schemes.formats.minifloat import MiniFloat

ELEMENTWISE = [n for n in quark.formats().names() if isinstance(number_format(n), MiniFloat | IntegerFormat)]


def spec(name: str) -> QTensorConfig:
    return QTensorConfig(dtype=name, qscheme="per_tensor", is_dynamic=False, symmetric=True)


@pytest.mark.parametrize("order", ["order", "reorder"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerGroup(8)], ids=repr)
@pytest.mark.parametrize("shape", [(24, 32), (3, 24), (8, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_packing_loses_nothing_and_meta_tensors_know_the_shape(name: str, shape: tuple[int, int], granularity: Any, order: str) -> None:
    fmt = number_format(name)
    codes = fmt.codes(torch.randn(shape, generator=torch.Generator().manual_seed(1)) * fmt.max_magnitude(spec(name)))
    packed = fmt.packing.pack(codes, granularity, order)
    assert torch.equal(fmt.packing.unpack(packed, granularity, order, shape).view(torch.uint8), codes.view(torch.uint8))
    described = fmt.packing.pack(codes.to("meta"), granularity, order)
    assert (described.shape, described.dtype) == (packed.shape, packed.dtype)
    if shape == (24, 32):
        assert packed.numel() * packed.element_size() * 8 == codes.numel() * fmt.bits


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
