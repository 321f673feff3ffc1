"""Laws of every tensor quantizer: codes, values and simulation agree exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quark.config.layer import levels
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError, ConfigError, UnknownNameError
from quark.numbers import TensorQuantizer, quantizer_for
from quark.numbers import single_level as engine
from quark.plugins import documented_object, schemes

CASES = {
    "int4 groups": ("Int4PerGroupSpec", {"ch_axis": -1, "group_size": 16}),
    "uint4 groups": ("Uint4PerGroupSpec", {"ch_axis": -1, "group_size": 16}),
    "whole-axis groups": ("Int4PerGroupSpec", {"ch_axis": -1, "group_size": -1}),
    "int8 channels of axis 0": ("Int8PerChannelSpec", {"ch_axis": 0}),
    "uint4 channels of axis 1": ("Uint4PerChannelSpec", {"ch_axis": 1}),
    "real zero points": ("Uint4PerChannelSpec", {"ch_axis": 0, "zero_point_type": "float32"}),
    "int8 tensor": ("Int8PerTensorSpec", {}),
    "uint8 tensor": ("Uint8PerTensorSpec", {}),
    "fp8 tensor": ("FP8E4M3PerTensorSpec", {}),
    "fp8 channels": ("FP8E5M2PerChannelSpec", {"ch_axis": 0}),
    "mxfp4": ("OCP_MXFP4Spec", {"ch_axis": -1}),
    "mxfp6": ("OCP_MXFP6E2M3Spec", {"ch_axis": -1}),
    "mxfp8": ("OCP_MXFP8E4M3Spec", {"ch_axis": -1}),
    "fp4 with real scales": ("FP4PerGroupSpec", {"ch_axis": -1, "group_size": 16}),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quantizer(case: str) -> TensorQuantizer:
    name, options = CASES[case]
    return quantizer_for(documented_object(name)(**options, is_dynamic=False).to_quantization_spec(), activation=False)


def data(rows: int = 24, columns: int = 64, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g) * 2.0 ** torch.randint(-6, 6, (rows, 1), generator=g)


@pytest.mark.parametrize("case", ["int8 tensor", "two levels"])
def test_a_quantizer_has_the_spec_of_each_of_its_levels(case: str) -> None:
    made = quantizer_for(schemes().load_config("nvfp4")().weight, activation=False) if case == "two levels" else quantizer(case)
    assert levels(made.spec) == tuple(level.spec for level in made.levels)
    assert isinstance(made.spec, QTensorConfig) is (case == "int8 tensor")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_simulation_is_dequantized_codes(case: str, dtype: torch.dtype) -> None:
    q, x = quantizer(case), data().to(dtype)
    values, qparams = q.round_to_nearest(x)
    assert values.dtype == dtype
    assert torch.equal(values, q.dequantize(q.quantize(x, qparams), qparams).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_codes_are_had_back_from_rounded_values(case: str, dtype: torch.dtype) -> None:
    q, x = quantizer(case), data().to(dtype)
    values, qparams = q.round_to_nearest(x)
    codes = q.quantize(values, qparams)
    assert torch.equal(q.dequantize(codes, qparams).to(dtype), values)
    assert torch.equal(q.fake_quantize(values, qparams), values), "rounding twice changes nothing"


@pytest.mark.parametrize("order", ["order", "reorder"])
@pytest.mark.parametrize("case", CASES)
def test_packed_tensors_bring_codes_and_scales_back_bit_for_bit(case: str, order: str) -> None:
    q, x = quantizer(case), data()
    _, qparams = q.round_to_nearest(x)
    codes = q.quantize(x, qparams)
    back, scales = q.unpack(q.pack(codes, qparams, order=order), (24, 64), order=order)
    assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(q.dequantize(back, scales), q.dequantize(codes, qparams))


@pytest.mark.parametrize("case", CASES)
def test_the_result_does_not_depend_on_the_size_of_tiles(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, x = quantizer(case), data()
    values, qparams = q.round_to_nearest(x)
    codes = q.quantize(x, qparams)
    monkeypatch.setattr(engine, "TILE_ELEMENTS", 40)
    assert torch.equal(q.fake_quantize(x, qparams), values)
    assert torch.equal(q.quantize(x, qparams).view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("case", CASES)
def test_out_may_be_the_tensor_itself(case: str) -> None:
    q, x = quantizer(case), data()
    expected, qparams = q.round_to_nearest(x)
    same = x.clone()
    assert q.fake_quantize(same, qparams, out=same) is same
    assert torch.equal(same, expected)


@pytest.mark.parametrize("case", CASES)
def test_tensors_that_are_not_contiguous_give_the_same(case: str) -> None:
    q, x = quantizer(case), data()
    other = x.t().contiguous().t()
    assert not other.is_contiguous()
    assert torch.equal(q.fake_quantize(other), q.fake_quantize(x))


@pytest.mark.parametrize("case", CASES)
def test_empty_and_one_element_tensors_work(case: str) -> None:
    q = quantizer(case)
    values, qparams = q.round_to_nearest(torch.zeros(0, 64))
    assert values.shape == (0, 64)
    assert q.quantize(values, qparams).shape == (0, 64)
    if q.shape_error((1, 1)) is None:
        # Halfway between two codes of int8's range of 127.5 either neighbour is as near: half a step is all
        # that can be lost.
        assert q.fake_quantize(torch.tensor([[3.0]])).item() == pytest.approx(3.0, rel=0.08)


@pytest.mark.parametrize("case", CASES)
def test_zeros_stay_zero(case: str) -> None:
    assert torch.count_nonzero(quantizer(case).fake_quantize(torch.zeros(4, 64))) == 0


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith(("int", "uint", "whole"))])
@settings(max_examples=25)
@given(seed=st.integers(0, 1000))
def test_the_error_is_half_a_step_at_most(case: str, seed: int) -> None:
    q, x = quantizer(case), data(seed=seed)
    values, qparams = q.round_to_nearest(x)
    step = qparams.scale.reshape(-1, 1)
    error = q.granularity.rows(values - x).abs()
    # Symmetric ranges end half a step beyond the last code, and rounded zero points cost another half: only
    # at the ends of the range.
    assert (error <= step * (1 + 1e-4)).all()
    assert (error <= step * 0.5001).float().mean() > 0.9


def test_activations_with_dynamic_channels_of_axis_1_have_a_scale_for_each_token_at_any_rank() -> None:
    spec = documented_object("FP8E4M3PerChannelSpec")(ch_axis=1, is_dynamic=True).to_quantization_spec()
    q = quantizer_for(spec, activation=True)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert q.find_qparams(x).scale.shape == (2, 5)
    assert torch.equal(q.fake_quantize(x)[1, 3], q.fake_quantize(x[1, 3][None])[0])


def test_two_observers_merged_have_seen_both_data_sets() -> None:
    q = quantizer("uint8 tensor")
    one, other, both = q.observer(), q.observer(), q.observer()
    for observer, x in ((one, data(seed=1)), (other, data(seed=2)), (both, data(seed=1)), (both, data(seed=2))):
        observer.observe(x)
    one.merge(other)
    assert [t.item() for t in one.range()] == [t.item() for t in both.range()]


def test_an_observer_that_saw_nothing_has_no_range() -> None:
    with pytest.raises(CalibrationError, match="has seen no data"):
        quantizer("int8 tensor").observer().range()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("case", CASES)
def test_broken_values_show_in_the_scale(case: str, value: float) -> None:
    x = data()
    x[3, 5] = value
    assert not quantizer(case).find_qparams(x).scale.isfinite().all()


def test_scales_of_a_16_bit_tensor_are_float32_unless_the_spec_says_otherwise() -> None:
    x = data().bfloat16()
    assert quantizer("int4 groups").find_qparams(x).scale.dtype == torch.float32
    narrow = documented_object("Int4PerGroupSpec")(ch_axis=-1, group_size=16, scale_type="bfloat16").to_quantization_spec()
    assert quantizer_for(narrow, activation=False).find_qparams(x).scale.dtype == torch.bfloat16


PROBLEMS = {
    "int4 without symmetric": (QTensorConfig(dtype="int4", qscheme="per_tensor", is_dynamic=False), "needs symmetric"),
    "fp8 without is_dynamic": (QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor"), "needs is_dynamic"),
    "fp8 asymmetric": (QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=False, symmetric=False), "no zero point"),
    "another granularity's observer": (
        QTensorConfig(dtype="int8", qscheme="per_tensor", symmetric=True, is_dynamic=False, observer_cls="PerGroupMinMaxObserver"),
        "PerGroupMinMaxObserver supports per_group",
    ),
    "groups that do not divide": (
        QTensorConfig(dtype="int4", qscheme="per_group", ch_axis=-1, group_size=48, symmetric=True, is_dynamic=False,
                      observer_cls="PerGroupMinMaxObserver"),
        "groups of 48 do not divide",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "words"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_is_wrong_with_a_spec_is_known_without_data(spec: QTensorConfig, words: str) -> None:
    assert words in str(quantizer_for(spec, activation=False).shape_error((8, 64)))


def test_a_format_nobody_provides_is_refused_with_the_closest() -> None:
    spec = QTensorConfig(dtype="itn4", qscheme="per_tensor", symmetric=True, is_dynamic=False)
    with pytest.raises(UnknownNameError, match="int4"):
        quantizer_for(spec, activation=False)


def test_groups_along_another_axis_than_the_last_are_refused_but_those_along_the_first_of_a_weight() -> None:
    spec = documented_object("Int4PerGroupSpec")(ch_axis=0, group_size=16).to_quantization_spec()
    with pytest.raises(ConfigError, match="cannot run along ch_axis"):
        quantizer_for(spec, activation=True)
    assert quantizer_for(spec, activation=False).shape_error((32, 8)) is None


def test_casts_have_no_scales() -> None:
    q = quantizer_for(documented_object("Bfloat16Spec")().to_quantization_spec(), activation=False)
    x = data()
    assert q.is_float
    assert torch.equal(q.fake_quantize(x), x.bfloat16().float())
    assert q.pack_qparams(q.find_qparams(x)) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), exponent=st.integers(-130, 110))
def test_codes_that_are_said_to_survive_a_cast_do(case: str, dtype: torch.dtype, seed: int, exponent: int) -> None:
    q, x = quantizer(case), (data(seed=seed).clamp(-1e3, 1e3) * 2.0 ** (exponent / 8 if dtype is torch.float16 else exponent)).to(dtype)
    if not bool(x.isfinite().all()):
        return
    values, qparams = q.round_to_nearest(x)
    if q.recovers_codes(dtype, qparams):
        assert torch.equal(q.quantize(x, qparams).view(torch.uint8), q.codes_of(values, qparams).view(torch.uint8))


SURVIVING = [case for case in CASES if case not in ("real zero points", "uint8 tensor", "int8 channels of axis 0")]


@pytest.mark.parametrize("case", SURVIVING)
def test_codes_of_usual_weights_are_known_to_survive_bfloat16(case: str) -> None:
    q, x = quantizer(case), data().bfloat16()
    assert q.recovers_codes(torch.bfloat16, q.find_qparams(x))


@pytest.mark.parametrize(
    ("case", "dtype", "factor"),
    [
        ("uint8 tensor", torch.bfloat16, 1.0),  # 255 steps, of which bfloat16 tells 128 apart
        ("real zero points", torch.float32, 1.0),  # any number of steps
        ("fp8 tensor", torch.float16, 2.0**-12),  # values are subnormal numbers
        ("int8 tensor", torch.float16, 65_504.0),  # the value of code -128 is infinite
        ("mxfp4", torch.bfloat16, 0.0),
    ],
)
def test_codes_are_not_said_to_survive_where_values_lose_precision(case: str, dtype: torch.dtype, factor: float) -> None:
    q, x = quantizer(case), (data().clamp(-1, 1) * factor).to(dtype)
    assert not q.recovers_codes(dtype, q.find_qparams(x))


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), exponent=st.integers(-140, 110))
def test_codes_of_16_bit_numbers_are_those_of_the_same_numbers_in_float32(case: str, seed: int, exponent: int) -> None:
    q, x = quantizer(case), (data(seed=seed).clamp(-1e3, 1e3) * 2.0**exponent).bfloat16()
    qparams = q.find_qparams(x)
    assert torch.equal(q.quantize(x, qparams).view(torch.uint8), q.quantize(x.float(), qparams).view(torch.uint8))
