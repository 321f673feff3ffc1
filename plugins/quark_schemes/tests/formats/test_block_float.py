"""Block floating point against its definition, written out element by element: MXINT8, BFP16, MX6, MX9."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.numbers import PerGroup, number_format, quantizer_for
from quark_schemes.specs.microscaling import BFP16Spec, MX6Spec, MX9Spec, OCP_MXINT8Spec

CASES = {
    "mxint8": OCP_MXINT8Spec(ch_axis=-1),
    "bfp16": BFP16Spec(ch_axis=-1),
    "mx6": MX6Spec(ch_axis=-1, block_size=16),
    "mx6 in 32": MX6Spec(ch_axis=-1, block_size=32),
    "mx9": MX9Spec(ch_axis=-1, block_size=16),
}
NAMES = {"mxint8": "mx", "bfp16": "bfp16", "mx6": "mx6", "mx6 in 32": "mx6", "mx9": "mx9"}
values_of_a_block = st.lists(st.floats(-100, 100, width=16), min_size=32, max_size=32)


def exponent(value: float) -> int:
    return math.frexp(value)[1] - 1


def microexponent(x: list[float], block: int, magnitude_bits: int) -> list[float]:
    """MX6 or MX9 by the definition, in exact arithmetic."""
    found = []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        top = max(abs(v) for v in part)
        if top == 0:
            found += [0.0] * block
            continue
        shared = exponent(top)
        for i in range(0, block, 2):
            pair = part[i : i + 2]
            small = all(v == 0 or exponent(v) < shared for v in pair)
            step = 2.0 ** (shared - small - magnitude_bits + 1)
            limit = 2**magnitude_bits - 1
            found += [max(-limit, min(limit, round(v / step))) * step for v in pair]
    return found


def bfp16(x: list[float]) -> list[float]:
    """BFP16 by the definition."""
    found = []
    for start in range(0, len(x), 8):
        part = x[start : start + 8]
        top = max(abs(v) for v in part)
        step = 2.0 ** (exponent(top) - 6) if top else 1.0
        step *= 2 if round(max(part) / step) > 127 else 1
        found += [max(-128, min(127, round(v / step))) * step for v in part]
    return found


@pytest.mark.parametrize(("case", "block", "bits"), [("mx6", 16, 4), ("mx6 in 32", 32, 4), ("mx9", 16, 7)])
@given(values_of_a_block)
@settings(max_examples=150)
def test_microexponents_equal_their_definition(case: str, block: int, bits: int, x: list[float]) -> None:
    ours = quantizer_for(CASES[case].to_quantization_spec(), activation=False).fake_quantize(torch.tensor([x]))
    assert ours.flatten().tolist() == microexponent(x, block, bits)


@given(values_of_a_block)
def test_bfp16_equals_its_definition(x: list[float]) -> None:
    ours = quantizer_for(CASES["bfp16"].to_quantization_spec(), activation=False).fake_quantize(torch.tensor([x]))
    assert ours.flatten().tolist() == bfp16(x)


@pytest.mark.parametrize(
    ("largest", "expected"), [(127, (127, 1)), (127.25, (127, 1)), (127.5, (128, 0)), (-127.75, (-128, 1)), (-128, (-128, 0))]
)
def test_the_exponent_of_bfp16_grows_only_where_the_largest_would_round_beyond_its_mantissa(
    largest: float, expected: tuple[int, int]
) -> None:
    """In 64ths. Under the higher exponent a step is 2 of them, and 1 is rounded to even, which is 0."""
    x = torch.tensor([[largest / 64, 1 / 64, *[0.0] * 6]])
    found = quantizer_for(CASES["bfp16"].to_quantization_spec(), activation=False).fake_quantize(x).flatten().tolist()
    assert (found[0] * 64, found[1] * 64) == expected
    assert found == bfp16(x.flatten().tolist())


@pytest.mark.parametrize("case", CASES)
@given(values_of_a_block)
def test_codes_and_bytes_give_back_the_values(case: str, x: list[float]) -> None:
    quantizer = quantizer_for(CASES[case].to_quantization_spec(), activation=False)
    values, qparams = quantizer.round_to_nearest(torch.tensor([x]))
    codes = quantizer.codes_of(values, qparams)
    assert torch.equal(quantizer.dequantize(codes, qparams), values)
    packed = quantizer.pack(codes, qparams)
    again, read = quantizer.unpack(packed, (1, 32))
    assert torch.equal(again, codes)
    assert torch.equal(quantizer.dequantize(again, read), values)
    assert torch.equal(quantizer.fake_quantize(values, qparams), values), "rounding again changes nothing"


@pytest.mark.parametrize("name", ["mx6", "mx9"])
def test_every_code_of_a_pair_comes_back(name: str) -> None:
    fmt = number_format(name)
    high = int(fmt.high)  # type: ignore[attr-defined]
    wide = torch.cartesian_prod(torch.arange(-high, high + 1), torch.arange(-high, high + 1)).float()
    limit = (high + 1) / 2
    # Pairs of small values have the finer step: only there are halves, and only there is the bit.
    small = (wide.abs() < limit).all(1)
    for pairs, bit in ((wide[~small], 0), (wide[(wide.abs() / 2 < limit).all(1)] / 2, 1)):
        codes = fmt.encode(pairs.clone())
        assert (codes & 1 == bit).all()
        assert torch.equal(fmt.decode(codes), pairs)
        assert torch.equal(fmt.round_(pairs.clone()), pairs)


@pytest.mark.parametrize("case", CASES)
def test_zero_blocks_are_zero_and_broken_ones_stay_visible(case: str) -> None:
    quantizer = quantizer_for(CASES[case].to_quantization_spec(), activation=True)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    y = quantizer.fake_quantize(x)
    assert torch.equal(y[0], torch.zeros(64))
    assert y[1, :32].isnan().any()
    assert not y[2, 32:].isfinite().all()
    assert y[3].isfinite().all()
    assert torch.equal(y[3], quantizer.fake_quantize(x[3:])[0]), "other rows do not notice"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("factor", [1e-38, 1e-30, 1e30])
def test_extreme_magnitudes_neither_overflow_nor_lose_the_sign_of_the_largest(case: str, factor: float) -> None:
    quantizer = quantizer_for(CASES[case].to_quantization_spec(), activation=True)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)) * factor
    y = quantizer.fake_quantize(x)
    assert y.isfinite().all()
    if factor > 1e-38:
        assert ((y - x).abs().amax(1) <= x.abs().amax(1) / 8).all()


def mx(element: str, **more: object) -> QTensorConfig:
    return QTensorConfig(dtype="mx", mx_element_dtype=element, ch_axis=-1, group_size=32, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("element", ["fp4", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2"])
def test_mx_of_a_float_element_is_that_element_under_shared_powers_of_two(element: str) -> None:
    """Configurations of the first generation wrote every OCP format so."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    plain = QTensorConfig(
        dtype=element,
        qscheme="per_group",
        ch_axis=-1,
        group_size=32,
        scale_format="e8m0",
        observer_cls="PerBlockMXObserver",
        is_dynamic=True,
    )
    assert torch.equal(quantizer_for(mx(element), activation=True).fake_quantize(x), quantizer_for(plain, activation=True).fake_quantize(x))


def test_mx_without_an_element_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs mx_element_dtype"):
        quantizer_for(QTensorConfig(dtype="mx", ch_axis=-1, group_size=32), activation=True)


@pytest.mark.parametrize("mode", ["even", "floor", "ceil", "rceil"])
def test_mxint8_honours_its_scale_modes(mode: str) -> None:
    """1.999 rounds up to the next exponent in all modes but floor, where it saturates at 127/64."""
    x = torch.full((1, 32), 1.999)
    y = quantizer_for(mx("int8", scale_calculation_mode=mode), activation=True).fake_quantize(x)
    assert float(y[0, 0]) == (127 / 64 if mode == "floor" else 2.0)


def test_a_block_that_does_not_fill_whole_bytes_is_refused() -> None:
    assert "use 16 or 32" in str(
        quantizer_for(MX6Spec(ch_axis=-1, block_size=8).to_quantization_spec(), activation=True).shape_error((4, 32))
    )
    assert "do not divide" in str(quantizer_for(CASES["mx6"].to_quantization_spec(), activation=True).shape_error((4, 40)))


def test_bits_of_an_element_follow_from_the_bytes() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    for case, bits in (("mxint8", 8.25), ("bfp16", 9.0), ("mx6", 6.0), ("mx6 in 32", 5.75), ("mx9", 9.0)):
        quantizer = quantizer_for(CASES[case].to_quantization_spec(), activation=False)
        values, qparams = quantizer.round_to_nearest(x)
        packed: dict[str, Tensor] = quantizer.pack(quantizer.codes_of(values, qparams), qparams)
        assert sum(t.nbytes for t in packed.values()) * 8 / x.numel() == bits
        assert all(t.dtype in (torch.uint8, torch.int8) for t in packed.values())


@pytest.mark.parametrize(("name", "bits"), [("mx6", 5), ("mx9", 8)])
def test_a_stored_block_is_its_mantissas_and_then_the_bits_of_its_pairs(name: str, bits: int) -> None:
    fmt = number_format(name)
    blocks = [(range(-8, 8), 0b10001101), (range(7, -9, -1), 0b00000111)]  # mantissas, and the bits of pairs, the first the lowest
    codes = torch.tensor([[2 * m + (pairs >> i // 2 & 1) for mantissas, pairs in blocks for i, m in enumerate(mantissas)]])
    stored = b""
    for mantissas, pairs in blocks:
        number = sum((m & (1 << bits) - 1) << bits * i for i, m in enumerate(mantissas))
        stored += number.to_bytes(16 * bits // 8, "little") + bytes([pairs])
    packed = fmt.packing.pack(codes.to(torch.int16), PerGroup(16), "reorder")
    assert bytes(packed.flatten().tolist()) == stored
    assert torch.equal(fmt.packing.unpack(packed, PerGroup(16), "reorder", (1, 32)), codes)
