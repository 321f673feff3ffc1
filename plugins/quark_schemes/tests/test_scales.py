"""Shared exponents of MX blocks, by the worked examples of the reference, and their bytes."""

import pytest
import torch

from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.quantizers import quantizer_for
from quark_schemes.formats.scales import decode_e8m0, encode_e8m0, power_of_two, scale_format_of, shared_exponent_scale

EXAMPLES = [
    (1.0, 0.25, 0.25, 0.25),
    (1.75, 0.5, 0.25, 0.5),
    (2.0, 0.5, 0.5, 0.5),
    (3.4, 0.5, 0.5, 1.0),
    (3.5, 1.0, 0.5, 1.0),
    (5.0, 1.0, 1.0, 2.0),
    (7.0, 2.0, 1.0, 2.0),
    (8.0, 2.0, 2.0, 2.0),
    (448.0, 128.0, 64.0, 128.0),
]


@pytest.mark.parametrize(("amax", "even", "floor", "ceil"), EXAMPLES)
def test_the_scale_of_fp4_blocks_in_each_mode(amax: float, even: float, floor: float, ceil: float) -> None:
    found = [float(shared_exponent_scale(torch.tensor([amax]), mode, 1, 2)) for mode in ("even", "floor", "ceil")]
    assert found == [even, floor, ceil]


@pytest.mark.parametrize(("mantissa_bits", "largest_exponent", "largest"), [(1, 2, 6.0), (3, 8, 448.0), (2, 4, 28.0), (3, 2, 7.5)])
def test_rceil_is_the_smallest_power_of_two_with_which_nothing_saturates(mantissa_bits: int, largest_exponent: int, largest: float) -> None:
    amax = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 100 + 1e-3
    amax[:3] = torch.tensor([largest, 2 * largest, largest / 4])
    scale = shared_exponent_scale(amax, "rceil", mantissa_bits, largest_exponent, largest)
    assert (amax / scale <= largest).all()
    assert (amax / (scale / 2) > largest).all()
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))


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
    # Half a step, and what a scale that was rounded down cuts off. Powers of two are rounded up, by a factor below 2; those of MX blocks
    # go by mode "even", with which up to 7 of 6 are cut off.
    amax = quantizer.granularity.rows(x).abs().amax(1).repeat_interleave(16).reshape(x.shape)
    cut = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "e5m3": 2.0**-4, "e5m3 format": 2.0**-4, "e4m3 format": 2.0**-4}.get(kind, 0.0)
    cut = 1 / 7 if kind == "e8m0 format" and dtype.startswith("fp") else cut
    assert ((values - x).abs() <= (_half_steps(dtype) * (1 + cut if cut else 2) + cut) * amax).all()


@pytest.mark.parametrize("scale", [{}, {"scale_type": "float8_e8m0fnu"}, {"scale_format": "e8m0"}, {"scale_type": "pof2"}], ids=str)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_two_dimensional_blocks_have_a_scale_each_and_reload(dtype: str, scale: dict[str, str]) -> None:
    """As runtimes read block FP8: scales ``[rows / R, columns / C]``, of E8M0 type where the spec's scale type says so."""
    spec = QTensorConfig(dtype=dtype, qscheme="per_block", block_size=(4, 8), symmetric=True, is_dynamic=False, **scale)
    quantizer = quantizer_for(spec, activation=False)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    assert quantizer.shape_error((16, 64)) is None
    assert "is not made of blocks of [4, 8]" in str(quantizer.shape_error((16, 60)))
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


def test_an_empty_block_gets_the_smallest_normal_scale_and_a_broken_one_stays_visible() -> None:
    found = shared_exponent_scale(torch.tensor([0.0, torch.inf, torch.nan]), "even", 1, 2)
    assert found[0] == 2.0**-126
    assert not found[1:].isfinite().any()


def test_tiny_blocks_end_at_the_smallest_exponent() -> None:
    assert shared_exponent_scale(torch.tensor([1e-44]), "even", 1, 2).item() == 2.0**-127


def test_every_byte_but_nan_is_a_power_of_two_and_comes_back() -> None:
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scale = decode_e8m0(data)
    assert scale[255].isnan()
    assert torch.equal(scale[:255].double(), 2.0 ** (torch.arange(255).double() - 127))
    assert torch.equal(encode_e8m0(scale), data)


def test_powers_of_two_are_exact() -> None:
    exponent = torch.arange(-127, 128, dtype=torch.int32)
    assert torch.equal(power_of_two(exponent).double(), 2.0 ** exponent.double())


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of even, floor, ceil, rceil"):
        shared_exponent_scale(torch.ones(1), "up", 1, 2)
