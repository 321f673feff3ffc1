"""Quantizers with a view: the matrix of a convolution's weight, and activations with channels last."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.numbers import ChannelsLast, KernelMatrix, output_first_shape, quantizer_for, viewed
from quark.plugins import documented_object

INT4_ROWS = documented_object("Int4PerChannelSpec")(ch_axis=0).to_quantization_spec()
INT8_ROWS = documented_object("Int8PerChannelSpec")(ch_axis=0, symmetric=False).to_quantization_spec()
INT4_GROUPS = documented_object("Int4PerGroupSpec")(ch_axis=-1, group_size=4).to_quantization_spec()
FP8 = documented_object("FP8E4M3PerTensorSpec")(is_dynamic=False).to_quantization_spec()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(1, 3), max_size=3), st.booleans())
def test_the_matrix_of_a_kernel_holds_each_value_once(
    inputs: int, outputs: int, groups: int, kernel: list[int], is_transposed: bool
) -> None:
    """`inputs` and `outputs` of each group; a row has the weights of one output, input channels innermost."""
    shape = (groups * inputs, outputs, *kernel) if is_transposed else (groups * outputs, inputs, *kernel)
    weight, view = torch.randperm(torch.Size(shape).numel()).view(shape), KernelMatrix(is_transposed, groups)
    matrix = view.arranged(weight)
    assert tuple(matrix.shape) == view.shape(shape) == (groups * outputs, inputs * torch.Size(kernel).numel())
    assert torch.equal(view.restored(matrix, shape), weight)
    for row in range(groups * outputs):
        group, output = divmod(row, outputs)
        own = weight[group * inputs : (group + 1) * inputs, output] if is_transposed else weight[row]
        assert torch.equal(matrix[row], own.movedim(0, -1).flatten())


def test_exchanging_channels_is_its_own_inverse() -> None:
    assert output_first_shape(output_first_shape((8, 6, 3, 3), 2), 2) == (8, 6, 3, 3)


@pytest.mark.parametrize("spec", [INT4_ROWS, INT8_ROWS, INT4_GROUPS, FP8], ids=["int4", "int8", "groups", "fp8"])
@pytest.mark.parametrize("order", ["reorder", "order"])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_codes_survive_packing_and_agree_with_values(spec: object, order: str, is_transposed: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8, 3, 3)
    quantizer = viewed(quantizer_for(spec, activation=False), KernelMatrix(is_transposed, groups=2 if is_transposed else 1))
    values, qparams = quantizer.round_to_nearest(weight)
    codes = quantizer.quantize(weight, qparams)
    assert torch.equal(quantizer.dequantize(codes, qparams), values)
    assert torch.equal(quantizer.fake_quantize(weight, qparams), values)
    written = torch.empty(weight.shape, dtype=torch.bfloat16)
    quantizer.dequantize_to(codes, qparams, written)
    assert torch.equal(written, values.bfloat16())
    empty_codes, empty_scales = quantizer.empty_codes(tuple(weight.shape))
    assert (empty_codes.shape, empty_codes.dtype) == (codes.shape, codes.dtype)
    assert (empty_scales.scale.shape, empty_scales.scale.dtype) == (qparams.scale.shape, qparams.scale.dtype)
    stored = quantizer.pack(codes, qparams, order=order)
    again, scales = quantizer.unpack(stored, tuple(weight.shape), order=order)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scales.scale, qparams.scale)
    assert (stored[""].shape == weight.shape) == (spec in (INT8_ROWS, FP8)), "codes of a byte keep the shape that the weight has"
    out = torch.empty_like(weight)
    assert quantizer.fake_quantize(weight, qparams, out=out) is out
    assert torch.equal(out, values)


def test_observers_see_the_arrangement_and_merge() -> None:
    quantizer = viewed(quantizer_for(INT8_ROWS, activation=False), KernelMatrix(is_transposed=True))
    first, second = torch.randn(2, 3, 5, 2, 2, generator=torch.Generator().manual_seed(0))
    one, other = quantizer.observer(), quantizer.observer()
    one.observe(first)
    other.observe(second)
    one.merge(other)
    assert torch.equal(quantizer.qparams_from(one).scale, quantizer.find_qparams(torch.cat([first, second])).scale)


@pytest.mark.parametrize("shape", [(2, 8, 3, 5), (8, 3, 5)], ids=["batch", "one"])
def test_groups_of_activations_run_along_the_channels_with_and_without_a_batch(shape: tuple[int, ...]) -> None:
    spec = documented_object("FP4PerGroupSpec")(ch_axis=-1, group_size=4, scale_format="float32", is_dynamic=True).to_quantization_spec()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    plain = quantizer_for(spec, activation=False)
    expected = plain.fake_quantize(x.movedim(-3, -1).contiguous()).movedim(-1, -3)
    assert torch.equal(viewed(plain, ChannelsLast(-3)).fake_quantize(x), expected)
