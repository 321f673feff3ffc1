"""Integers of 16 and 32 bits: INT32, for biases, loses almost nothing, and UINT16 is stored as its bits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quark.config.enums import Dtype, QSchemeType, RoundType, ScaleType
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.numbers import PerTensor, QParams, canonicalize, number_format, quantizer_for
from quark.torch import ModelQuantizer
from quark.torch.quantization.observer import observer as documented

TENSOR_OBSERVERS = [name for name in dir(documented) if name.startswith("PerTensor")]


def spec(dtype: str = "int32", **changes: Any) -> QTensorConfig:
    """A spec in the words of AMD Quark's pages."""
    fields = {
        "observer_cls": "PerTensorMinMaxObserver",
        "qscheme": QSchemeType.per_tensor,
        "symmetric": True,
        "scale_type": ScaleType.float,
        "round_method": RoundType.half_even,
        "is_dynamic": False,
    }
    return QTensorConfig(dtype=Dtype(dtype), **fields | changes)


@settings(max_examples=60)
@given(st.integers(-100, 100), st.integers(0, 10_000))
def test_int32_moves_no_value_by_more_than_half_a_step_and_finds_its_codes_again(exponent: int, seed: int) -> None:
    quantizer = quantizer_for(spec(), activation=False)
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    rounded, qparams = quantizer.round_to_nearest(x)
    scale, codes = float(qparams.scale), quantizer.codes_of(rounded, qparams)
    assert torch.frexp(qparams.scale)[0] == 0.5  # a power of two
    assert float((rounded.double() - x.double()).abs().max()) <= scale / 2
    assert scale <= 4 * float(x.abs().max()) / 2**31 or scale == torch.finfo(torch.float32).tiny
    assert torch.equal(rounded.double(), codes.double() * scale)
    assert torch.equal(quantizer.codes_of(x, qparams), codes)
    large = x.abs() >= scale * 2**23  # of which float32 has no digit below a step
    assert torch.equal(rounded[large], x[large])


def test_int32_saturates_at_the_largest_numbers_of_float32() -> None:
    codes = number_format("int32").codes(torch.tensor([-1e30, 1e30, 2.0**31, -(2.0**31)]))
    assert codes.tolist() == [-(2**31), 2**31 - 128, 2**31 - 128, -(2**31)]


@pytest.mark.parametrize("scale_type", ["float", "float32", "float16", "bfloat16", "pof2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int32_has_powers_of_two_as_scales_and_no_zero_points_whatever_is_asked(scale_type: str, symmetric: bool) -> None:
    (level,) = canonicalize(spec(scale_type=scale_type, symmetric=symmetric))
    assert (level.scale_type, level.symmetric) == (ScaleType.pof2, True)


@pytest.mark.parametrize("changes", [{"scale_format": "e4m3"}, {"scale_format": "e5m3"}, {"scale_type": "float8_e5m3"}])
def test_int32_with_other_scales_is_refused(changes: dict[str, str]) -> None:
    config = QConfig(QLayerConfig(bias=spec(**changes)))
    with pytest.raises(ConfigError, match="int32 has power-of-two scales: leave out scale_format, and set scale_type"):
        ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(8, 8)))


@pytest.mark.parametrize("name", TENSOR_OBSERVERS)
@pytest.mark.parametrize("dtype", ["int32", "uint16"])
def test_every_observer_of_tensors_serves_biases(dtype: str, name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    bias = model[0].bias.detach().clone()
    config = QConfig(QLayerConfig(bias=spec(dtype, observer_cls=getattr(documented, name), symmetric=dtype == "int32")))
    layer: Any = ModelQuantizer(config).quantize_model(model)[0]
    step = float(layer.bias_quantizer.scale)
    assert step <= 16 * float(bias.abs().max()) / 2 ** Dtype(dtype).to_bitwidth()
    assert float((layer.bias - bias).abs().max()) <= step * 1.001


@pytest.mark.parametrize("zero", [torch.tensor(40_000, dtype=torch.int32), torch.tensor([0, 40_000, 65_535], dtype=torch.int32)])
def test_uint16_is_stored_as_its_bits_and_comes_back(zero: torch.Tensor) -> None:
    packing, asymmetric = number_format("uint16").packing, spec("uint16", symmetric=False)
    codes = torch.arange(1 << 16).to(torch.uint16).reshape(256, 256)
    packed = packing.pack(codes, PerTensor(), "reorder")
    assert packed.dtype is torch.int16
    assert torch.equal(packing.unpack(packed, PerTensor(), "reorder", (256, 256)).to(torch.int32), codes.to(torch.int32))
    stored = packing.pack_qparams(QParams(torch.ones(zero.shape), zero), asymmetric, PerTensor(), "reorder")
    assert stored["zero_point"].dtype is torch.int16
    again = packing.unpack_qparams(stored, asymmetric, PerTensor(), "reorder", (256, 256)).zero_point
    assert again is not None
    assert torch.equal(again, zero)
