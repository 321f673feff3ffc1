"""Blocks of GGML hold the codes of a weight; the package gguf reads the values from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.numbers import QParams, TensorQuantizer, quantizer_for
from quark.torch import LLMTemplate
from quark_exporters.gguf_layout.ggml_blocks import Q8_0, BlockType, block_type_for

gguf = pytest.importorskip("gguf", reason="the extra quark-exporters[gguf] is not installed")

TYPES = {
    "int4_wo_32": "Q4_0",
    "int4_wo_64": "Q4_0",
    "int4_wo_128": "Q4_0",
    "int4_wo_per_channel": "Q4_0",
    "uint4_wo_32": "Q4_1",
    "uint4_wo_per_channel": "Q4_1",
    "int8": "Q8_0",
    "mxfp4_weight_only": "MXFP4",
}
NO_TYPE = ("fp8", "ptpc_fp8", "amdfp4_g32", "nvfp4", "mxfp6_e2m3", "int4_fp8", "bfp16", "mx9")


def quantizer_of(scheme: str) -> TensorQuantizer:
    return quantizer_for(LLMTemplate.get("llama").get_config(scheme=scheme).global_quant_config.weight, activation=False)


def weight(rows: int = 48, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05


def type_of(scheme: str, shape: tuple[int, ...] = (48, 256)) -> BlockType:
    kind = block_type_for(quantizer_of(scheme), shape)
    assert kind is not None
    return kind


def read(kind: BlockType, packed: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[kind.name])))


@pytest.mark.parametrize(("scheme", "name"), TYPES.items())
def test_the_package_gguf_reads_the_values_that_the_codes_stand_for(scheme: str, name: str) -> None:
    quantizer, kind, w = quantizer_of(scheme), type_of(scheme), weight()
    values, qparams = quantizer.round_to_nearest(w)
    packed = kind.packed(quantizer.codes_of(values, qparams), qparams)
    assert kind.name == name
    assert packed.shape == (48, kind.row_bytes(256))
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (32, kind.bytes_per_block)
    stored = read(kind, packed)
    if name == "MXFP4":
        assert torch.equal(stored, values)
        return
    # Scales, and for Q4_1 what is added, are rounded to float16: 11 bits of each, of codes up to 15 and an
    # offset up to as much.
    scale = (values.abs().max() if name == "Q8_0" else 16 * qparams.scale.max()) * 2.0**-11
    assert float((stored - values).abs().max()) <= 2 * float(scale)


@pytest.mark.parametrize("scheme", [s for s, name in TYPES.items() if name != "MXFP4"])
def test_with_scales_that_float16_has_the_values_are_the_same_to_the_bit(scheme: str) -> None:
    quantizer, kind = quantizer_of(scheme), type_of(scheme)
    values, qparams = quantizer.round_to_nearest(weight())
    codes = quantizer.codes_of(values, qparams)
    powers = QParams(torch.exp2(qparams.scale.log2().round()), qparams.zero_point)
    assert torch.equal(read(kind, kind.packed(codes, powers)), quantizer.dequantize(codes, powers))


def test_the_two_roundings_of_an_asymmetric_group_do_not_add_up() -> None:
    """The offset is that of the scale as float16 holds it, not that of the exact scale."""
    quantizer, kind = quantizer_of("uint4_wo_32"), type_of("uint4_wo_32")
    values, qparams = quantizer.round_to_nearest(weight() + 0.02)
    codes = quantizer.codes_of(values, qparams)
    in_half = QParams(qparams.scale.half().float(), qparams.zero_point)
    wanted = quantizer.dequantize(codes, in_half)
    scales = in_half.scale.repeat_interleave(32, 1) if in_half.scale.shape[0] == len(values) else in_half.scale.t().repeat_interleave(32, 1)
    errors = ((read(kind, kind.packed(codes, qparams)) - wanted) / scales).abs()
    assert float(errors.max()) <= 16 * 2.0**-11 / 2  # the offset alone is rounded: half a unit of a number up to 16 steps


@pytest.mark.parametrize("scheme", NO_TYPE)
def test_formats_that_ggml_does_not_have_get_no_type(scheme: str) -> None:
    assert block_type_for(quantizer_of(scheme), (48, 256)) is None


@pytest.mark.parametrize("shape", [(48, 250), (48,), (4, 48, 256)])
def test_rows_that_blocks_do_not_divide_get_no_type(shape: tuple[int, ...]) -> None:
    assert block_type_for(quantizer_of("int4_wo_per_channel"), shape) is None


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_every_pattern_of_codes_comes_back(rows: int, blocks: int, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, 32 * blocks), generator=generator, dtype=torch.uint8)
    zero = torch.randint(0, 16, (rows, blocks), generator=generator, dtype=torch.int32)
    kind = type_of("uint4_wo_32")
    stored = read(kind, kind.packed(codes, QParams(torch.ones(rows, blocks), zero)))
    assert torch.equal(stored, codes.float() - zero.repeat_interleave(32, 1))


@pytest.mark.parametrize("scale", [1e6, 1e-9])
def test_scales_beyond_float16_are_refused(scale: float) -> None:
    codes = torch.ones(2, 32, dtype=torch.int8)
    with pytest.raises(UnsupportedError, match="float16"):
        type_of("int4_wo_32").packed(codes, QParams(torch.full((2, 1), scale)))


def test_scales_that_are_no_powers_of_two_are_refused_as_mxfp4() -> None:
    codes = torch.ones(2, 32, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="powers of two"):
        type_of("mxfp4_weight_only").packed(codes, QParams(torch.full((2, 1), 0.3)))


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_scales_beyond_the_range_of_float16_are_refused_at_both_ends(scale: float) -> None:
    with pytest.raises(UnsupportedError, match="are out of the range of float16"):
        Q8_0.packed(torch.ones(1, 32, dtype=torch.int8), QParams(torch.tensor(scale)))


@pytest.mark.parametrize(("group", "wanted"), [(16, None), (48, None), (32, "Q4_0"), (96, "Q4_0")])
def test_only_groups_of_whole_blocks_have_a_type(group: int, wanted: str | None) -> None:
    spec = QTensorConfig(
        dtype="int4",
        qscheme="per_group",
        ch_axis=-1,
        group_size=group,
        symmetric=True,
        observer_cls="PerGroupMinMaxObserver",
        is_dynamic=False,
    )
    found = block_type_for(quantizer_for(spec, activation=False), (4, 96))
    assert (None if found is None else found.name) == wanted
