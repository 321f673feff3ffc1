"""Scales in every number format: on their own grid, positive, and the same after they were stored."""

import pytest
import torch

from quark.config.tensor import QTensorConfig
from quark.numbers import quantizer_for
from quark_schemes.scale_formats import scale_format_of

SCALES = {
    "float16": {"scale_type": "float16"},
    "bfloat16": {"scale_type": "bfloat16"},
    "pof2": {"scale_type": "pof2"},
    "e5m3": {"scale_type": "float8_e5m3"},
    "e8m0": {"scale_type": "float8_e8m0fnu"},
    "e4m3 format": {"scale_format": "e4m3"},
    "e5m3 format": {"scale_format": "e5m3"},
    "e8m0 format": {"scale_format": "e8m0"},
}

DTYPES = ("int4", "uint4", "int8", "fp4", "fp8_e4m3")


@pytest.mark.parametrize("dtype", ["int4", "fp4"])
def test_e4m3_scales_serve_small_tensors_too_by_one_more_scale(dtype: str) -> None:
    """By themselves they end at 2^-9: a tensor of values near 1e-4 would be lost."""
    grouped = {"qscheme": "per_group", "ch_axis": -1, "group_size": 16, "is_dynamic": False, "symmetric": True}
    quantizer = quantizer_for(QTensorConfig(dtype=dtype, scale_format="e4m3", **grouped), activation=False)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert (quantizer.fake_quantize(x) - x).norm() / x.norm() < 0.15


def test_scales_of_asymmetric_integers_cannot_be_in_e4m3() -> None:
    grouped = {"qscheme": "per_group", "ch_axis": -1, "group_size": 16, "is_dynamic": False, "symmetric": False}
    quantizer = quantizer_for(QTensorConfig(dtype="uint4", scale_format="e4m3", **grouped), activation=False)
    assert "set symmetric=True" in str(quantizer.shape_error((16, 64)))


@pytest.mark.parametrize("kind", SCALES)
def test_every_kind_of_scale_is_on_its_own_grid_positive_and_comes_back_from_storage(kind: str) -> None:
    scales = scale_format_of(QTensorConfig(dtype="int4", **SCALES[kind]))
    ideal = torch.logspace(-12, 2, 200)
    used = scales.round(ideal)
    assert (used > 0).all()
    stored = scales.encode(used)
    assert torch.equal(scales.decode(stored).float(), used.float())
    assert torch.equal(scales.round(used.float()).float(), used.float()), "rounding again changes nothing"
    assert stored.element_size() == {"pof2": 4, "float16": 2, "bfloat16": 2}.get(kind, 1)
    usual = (ideal > 1e-2) & (ideal < 100)
    widest = 1.0 if "e8m0" in kind or kind == "pof2" else 2.0**-4
    assert ((used.float() / ideal - 1).abs()[usual] <= widest * (1 + 1e-6)).all()


@pytest.mark.parametrize("mode", ["ceil", "floor"])
def test_power_of_two_scales_are_the_nearest_on_the_side_of_their_mode(mode: str) -> None:
    spec = QTensorConfig(dtype="int4", scale_type="pof2", scale_calculation_mode=mode)
    ideal = torch.tensor([0.3, 0.5, 0.7, 1.0, 1.5])
    assert scale_format_of(spec).round(ideal).tolist() == ([0.5, 0.5, 1, 1, 2] if mode == "ceil" else [0.25, 0.5, 0.5, 1, 1])


@pytest.mark.parametrize(("kind", "dtype"), [(k, d) for k in SCALES for d in DTYPES if (k, d) != ("e4m3 format", "uint4")])
def test_a_tensor_quantizes_and_reloads_with_every_kind_of_scale(kind: str, dtype: str) -> None:
    grouped = {"qscheme": "per_group", "ch_axis": -1, "group_size": 16, "is_dynamic": False}
    spec = QTensorConfig(dtype=dtype, symmetric=dtype != "uint4", **grouped, **SCALES[kind])
    quantizer = quantizer_for(spec, activation=False)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    assert quantizer.shape_error((16, 64)) is None
    values, qparams = quantizer.round_to_nearest(x)
    packed = quantizer.pack(quantizer.codes_of(values, qparams), qparams)
    assert torch.equal(quantizer.dequantize(*quantizer.unpack(packed, (16, 64))), values)
    described = quantizer.pack(
        torch.empty(16, 64, dtype=quantizer.codes_of(values, qparams).dtype, device="meta"), qparams.map(lambda t: t.to("meta"))
    )
    assert {k: (t.shape, t.dtype) for k, t in described.items()} == {k: (t.shape, t.dtype) for k, t in packed.items()}
    # Half a step, and what a scale that was rounded down cuts off. Powers of two are rounded up, by a factor
    # below 2; those of MX blocks go by mode "even", with which up to 7 of 6 are cut off.
    amax = quantizer.granularity.rows(x).abs().amax(1).repeat_interleave(16).reshape(x.shape)
    cut = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "e5m3": 2.0**-4, "e5m3 format": 2.0**-4, "e4m3 format": 2.0**-4}.get(kind, 0.0)
    cut = 1 / 7 if kind == "e8m0 format" and dtype.startswith("fp") else cut
    assert ((values - x).abs() <= (_half_steps(dtype) * (1 + cut if cut else 2) + cut) * amax).all()


@pytest.mark.parametrize("scale", [{}, {"scale_type": "float8_e8m0fnu"}, {"scale_format": "e8m0"}, {"scale_type": "pof2"}], ids=str)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_two_dimensional_blocks_have_a_scale_each_and_reload(dtype: str, scale: dict[str, str]) -> None:
    """As runtimes read block FP8.

    Scales ``[rows / R, columns / C]``, of E8M0 type where the spec's scale type says so.
    """
    spec = QTensorConfig(dtype=dtype, qscheme="per_block", block_size=(4, 8), symmetric=True, is_dynamic=False, **scale)
    quantizer = quantizer_for(spec, activation=False)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    assert quantizer.shape_error((16, 64)) is None
    assert "cannot be divided into blocks of [4, 8]" in str(quantizer.shape_error((16, 60)))
    values, qparams = quantizer.round_to_nearest(x)
    packed = quantizer.pack(quantizer.codes_of(values, qparams), qparams)
    assert packed["scale"].shape == (4, 8)
    stored = {"float8_e8m0fnu": torch.float8_e8m0fnu, "e8m0": torch.uint8}.get(next(iter(scale.values()), ""), torch.float32)
    assert packed["scale"].dtype == stored
    assert torch.equal(quantizer.dequantize(*quantizer.unpack(packed, (16, 64))), values)
    block = quantizer_for(spec.set(qscheme="per_tensor", block_size=None, scale_format=None), activation=False)
    if "scale_format" not in scale:
        assert torch.equal(values[4:8, 8:16], block.fake_quantize(x[4:8, 8:16])), "each block is a tensor of its own"


def _half_steps(dtype: str) -> float:
    """Half of the widest step, in units of the range's largest magnitude."""
    return {"int4": 1 / 15, "uint4": 2 / 15, "int8": 1 / 255, "fp4": 1 / 6, "fp8_e4m3": 16 / 448}[dtype]
