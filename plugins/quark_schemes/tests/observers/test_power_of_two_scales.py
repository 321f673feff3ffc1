"""Observers whose scales are powers of two: unsigned codes about a middle, and large numbers."""

import pytest
import torch
from torch import nn

import quark
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.numbers import number_format, quantizer_for
from quark.torch import ModelQuantizer
from quark_schemes.formats.integer import IntegerFormat

OBSERVERS = {
    "PerTensorPowOf2MinMaxObserver": {"qscheme": "per_tensor"},
    "PerTensorPowOf2MinMSEObserver": {"qscheme": "per_tensor"},
    "PerChannelPowOf2MinMaxObserver": {"qscheme": "per_channel", "ch_axis": 0},
    "PerChannelPowOf2MinMSEObserver": {"qscheme": "per_channel", "ch_axis": 0},
}
INTEGERS = [name for name in quark.formats().names() if isinstance(number_format(name), IntegerFormat)]


def spec_of(dtype: str, observer: str, **fields: object) -> QTensorConfig:
    known = {"symmetric": True, "is_dynamic": False} | OBSERVERS[observer] | fields
    return QTensorConfig(dtype=dtype, observer_cls=observer, **known)


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("dtype", [name for name in INTEGERS if name.startswith("u")])
def test_symmetric_unsigned_codes_hold_negative_values_as_well_as_positive_ones(dtype: str, observer: str) -> None:
    quantizer = quantizer_for(spec_of(dtype, observer), activation=False)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    values, qparams = quantizer.round_to_nearest(x)
    bits = int(number_format(dtype).bits)
    assert qparams.zero_point is not None
    assert qparams.zero_point.unique().tolist() == [1 << (bits - 1)]
    errors = (values - x).square()
    assert float(errors[x < 0].mean()) < 3 * float(errors[x > 0].mean())
    packed = quantizer.pack(quantizer.quantize(x, qparams), qparams)
    codes, stored = quantizer.unpack(packed, (16, 64))
    assert torch.equal(quantizer.dequantize(codes, stored), values)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_values_that_amd_quark_keeps_are_kept(observer: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].weight.data = (weight := torch.tensor([[-2.0, -1.0], [1.0, 1.75]]))
    quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec_of("uint8", observer))))
    quantized = quantizer.freeze(quantizer.quantize_model(model))
    assert torch.equal(quantized[0].weight, weight)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_scales_follow_the_size_of_the_numbers_up_to_the_largest(dtype: str, observer: str, symmetric: bool) -> None:
    x = torch.rand(4, 64, generator=torch.Generator().manual_seed(1)) - 0.6
    quantizer = quantizer_for(spec_of(dtype, observer, symmetric=symmetric), activation=False)
    _, qparams = quantizer.round_to_nearest(x)
    for exponent in (40, 100, 123):
        size = 2.0**exponent
        values, larger = quantizer.round_to_nearest(x * size)
        if number_format(dtype).bits == 16 and exponent == 123:  # its range need not be one of float32
            assert bool(values.isfinite().all())
            continue
        assert torch.equal(larger.scale, qparams.scale * size), exponent
