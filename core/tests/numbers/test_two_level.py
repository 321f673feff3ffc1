"""Specs of two levels: quantized scales, and a second quantization of the first one's codes."""

import pytest
import torch

import quark
from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.numbers import QParams, quantizer_for
from quark.numbers.progressive import ProgressiveQuantizer
from quark.numbers.two_level import TwoLevelQuantizer
from quark.plugins import documented_object

SCALED = {"nvfp4": 448.0, "amdfp4_global16": 114688.0, "amdfp4_global32": 114688.0}


def weight_quantizer(scheme: str) -> TwoLevelQuantizer | ProgressiveQuantizer:
    found = quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False)
    assert isinstance(found, TwoLevelQuantizer | ProgressiveQuantizer)
    return found


def data(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    x[0] *= 100
    x[1] = 0
    return x


@pytest.mark.parametrize("scheme", SCALED)
def test_block_scales_are_values_of_their_format_under_an_outer_scale_that_uses_its_range(scheme: str) -> None:
    quantizer, x = weight_quantizer(scheme), data(8, 64)
    qparams = quantizer.find_qparams(x)
    assert qparams.outer_scale is not None
    assert qparams.outer_scale == x.abs().max() / (6 * SCALED[scheme])
    assert qparams.scale.max() == SCALED[scheme]
    assert isinstance(quantizer, TwoLevelQuantizer)
    fmt = quantizer.scale_level.format
    assert torch.equal(fmt.decode(fmt.encode(qparams.scale.clone())), qparams.scale)


@pytest.mark.parametrize("scheme", [*SCALED, "int4_fp8"])
def test_fake_quantize_equals_quantize_and_dequantize_and_survives_storage(scheme: str) -> None:
    quantizer, x = weight_quantizer(scheme), data(16, 64)
    values, qparams = quantizer.round_to_nearest(x)
    assert torch.equal(quantizer.fake_quantize(x), values)
    assert torch.equal(quantizer.fake_quantize(x, qparams), values)
    codes = quantizer.quantize(x, qparams)
    assert torch.equal(quantizer.dequantize(codes, qparams), values)
    assert torch.equal(quantizer.codes_of(values, qparams), codes)
    packed = quantizer.pack(codes, qparams)
    again, read = quantizer.unpack(packed, (16, 64))
    assert torch.equal(quantizer.dequantize(again, read), values)
    meta = quantizer.pack(codes.to("meta"), qparams.map(lambda t: t.to("meta")))
    assert {k: (t.shape, t.dtype) for k, t in meta.items()} == {k: (t.shape, t.dtype) for k, t in packed.items()}


@pytest.mark.parametrize("scheme", [*SCALED, "int4_fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_come_back_from_values_in_sixteen_bits(scheme: str, dtype: torch.dtype) -> None:
    quantizer, x = weight_quantizer(scheme), data(16, 64).to(dtype)
    values, qparams = quantizer.round_to_nearest(x)
    assert values.dtype == dtype
    assert torch.equal(quantizer.codes_of(values, qparams), quantizer.quantize(x, qparams))


@pytest.mark.parametrize("scheme", [*SCALED, "int4_fp8"])
def test_siblings_share_the_scale_over_the_whole_tensor_and_nothing_else(scheme: str) -> None:
    quantizer, x, y = weight_quantizer(scheme), data(8, 64), data(4, 64) * 3
    shared = quantizer.observer()
    shared.observe(x)
    shared.observe(y)
    of_x, of_y = quantizer.find_qparams(x, shared), quantizer.find_qparams(y, shared)
    assert torch.equal(of_x.outer_scale, of_y.outer_scale)  # type: ignore[arg-type]
    assert torch.equal(of_y.outer_scale, quantizer.find_qparams(y).outer_scale), "y has the larger range"  # type: ignore[arg-type]
    assert of_x.scale.shape != of_y.scale.shape
    error = (quantizer.fake_quantize(x, of_x) - x).norm() / x.norm()
    assert error < 0.2


def test_activations_keep_the_outer_scale_and_find_block_scales_anew() -> None:
    quantizer = quantizer_for(quark.schemes().load_config("nvfp4")().input_tensors, activation=True)
    assert not quantizer.is_dynamic
    observer = quantizer.observer()
    for batch in (data(4, 32), data(2, 32) * 2):
        observer.observe(batch)
    kept = quantizer.qparams_from(observer)
    assert isinstance(kept, QParams)
    assert kept.scale == data(4, 32).abs().max() * 2 / 2688
    assert quantizer.pack_qparams(kept).keys() == {"scale_2"}
    read = quantizer.unpack_qparams(quantizer.pack_qparams(kept), (1,))
    x = data(3, 32)
    assert torch.equal(quantizer.fake_quantize(x, read), quantizer.fake_quantize(x, kept))
    small, large = quantizer.fake_quantize(x / 50, kept), quantizer.fake_quantize(x, kept)
    assert (small - x / 50).norm() / (x / 50).norm() < 0.15, "small activations get small block scales"
    assert (large - x).norm() / x.norm() < 0.15


def test_all_zeros_and_empty_tensors_quantize_to_themselves() -> None:
    for scheme in (*SCALED, "int4_fp8"):
        quantizer = weight_quantizer(scheme)
        assert torch.equal(quantizer.fake_quantize(torch.zeros(4, 64)), torch.zeros(4, 64))
        assert quantizer.fake_quantize(torch.zeros(0, 64)).shape == (0, 64)


@pytest.mark.parametrize("scheme", [*SCALED, "int4_fp8"])
def test_nan_and_inf_stay_visible(scheme: str) -> None:
    quantizer = weight_quantizer(scheme)
    for bad in (torch.nan, torch.inf):
        x = data(4, 64)
        x[2, 3] = bad
        assert not quantizer.fake_quantize(x).isfinite().all()


def test_the_second_level_of_a_progressive_spec_sees_what_the_first_can_say() -> None:
    """INT4 rounds the values that FP8 has rounded, by channel; the result equals two separate steps."""
    quantizer, x = weight_quantizer("int4_fp8"), data(8, 64)
    first, second = (quantizer_for(level, activation=False) for level in quark.schemes().load_config("int4_fp8")().weight)
    values, qparams = quantizer.round_to_nearest(x)
    in_fp8, scale = first.round_to_nearest(x)
    one_by_one = second.fake_quantize(in_fp8 / scale.scale) * scale.scale
    assert torch.allclose(values, one_by_one, rtol=1e-6)
    assert torch.equal(qparams.outer_scale, scale.scale)  # type: ignore[arg-type]


def test_scales_in_e4m3_of_one_level_mean_two() -> None:
    """``scale_format="e4m3"`` with dynamic ranges is NVFP4 with a dynamic outer scale."""
    helper = documented_object("FP4PerGroupSpec")
    spec = helper(ch_axis=-1, group_size=16, scale_format="e4m3", is_dynamic=True).to_quantization_spec()
    quantizer = quantizer_for(spec, activation=True)
    assert isinstance(quantizer, TwoLevelQuantizer)
    assert quantizer.is_dynamic
    x = data(8, 64)
    assert torch.equal(quantizer.fake_quantize(x), weight_quantizer("nvfp4").fake_quantize(x))


def test_scales_of_scales_may_be_powers_of_two() -> None:
    blocks = level("fp4", qscheme="per_group", ch_axis=-1, group_size=16, scale_type="float32")
    quantizer = quantizer_for((blocks, level("fp8_e8m0", is_scale_quant=True)), activation=False)
    assert quantizer.shape_error((8, 64)) is None
    x = data(8, 64)
    values, qparams = quantizer.round_to_nearest(x)
    assert qparams.outer_scale == x.abs().max() / 6
    assert torch.equal(torch.frexp(qparams.scale)[0], torch.full_like(qparams.scale, 0.5))
    packed = quantizer.pack(quantizer.codes_of(values, qparams), qparams)
    assert packed["scale"].dtype == torch.uint8
    assert torch.equal(quantizer.dequantize(*quantizer.unpack(packed, (8, 64))), values)
    assert (values - x).norm() / x.norm() < 0.15


def level(dtype: str, **more: object) -> QTensorConfig:
    return QTensorConfig(dtype=dtype, is_dynamic=False, symmetric=True, **{"qscheme": "per_tensor", **more})  # type: ignore[arg-type]


def test_three_levels_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no number format builds a quantizer of the 3 levels fp8_e4m3 → int8 → int4"):
        quantizer_for((level("fp8_e4m3"), level("int8"), level("int4")), activation=False)


def test_levels_that_cannot_go_together_are_refused_with_the_cure() -> None:
    channel = level("int4", qscheme="per_channel", ch_axis=0)
    group = level("fp4", qscheme="per_group", ch_axis=-1, group_size=16)
    cases = {
        "per_tensor in the second level": (group, level("fp8_e4m3", qscheme="per_channel", ch_axis=0, is_scale_quant=True)),
        "set qscheme=per_tensor": (channel, level("int4")),
        "set symmetric=True": (group.set(dtype="uint4", symmetric=False), level("fp8_e4m3", is_scale_quant=True)),
        "set is_dynamic alike": (level("fp8_e4m3"), channel.set(is_dynamic=True)),
    }
    for cure, spec in cases.items():
        assert cure in str(quantizer_for(spec, activation=False).shape_error((16, 64)))
