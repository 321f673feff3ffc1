"""Observers: documented, mergeable, honest about NaN, and part of the whole.

Helpers name them and models are calibrated with them.
"""

import math

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import CalibrationError
from quark.numbers import Observer, WeightGrid, quantizer_for
from quark.torch import ModelQuantizer
from quark.torch.quantization.observer import observer as documented
from quark_tiny_model import calibration_batches, tiny_model

from .quantizers import heavy_tailed, quantizer_of, seen, spec_of

TENSOR = [
    "PerTensorMinMaxObserver",
    "PerTensorHistogramObserver",
    "PerTensorHistogramObserverPro",
    "PerTensorPercentileObserver",
    "PerTensorMSEObserver",
    "PerTensorPowOf2MinMaxObserver",
    "PerTensorPowOf2MinMSEObserver",
]
CHANNEL = ["PerChannelMinMaxObserver", "PerChannelPowOf2MinMaxObserver"]
GROUP = ["PerGroupMinMaxObserver", "PerBlockMXObserver", "PerBlockBFPObserver", "PerBlockMXBufferReuseObserver", "PerBlockMXDiffsObserver"]
ONCE = ["PerChannelMSEObserver", "PerGroupMSEObserver", "PerChannelPowOf2MinMSEObserver"]


def same(a: Observer, b: Observer) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.range(), b.range(), strict=True))


def test_every_documented_name_is_an_observer() -> None:
    for name in [*TENSOR, *CHANNEL, *GROUP, *ONCE, "PlaceholderObserver", "PerBlock2DMinMaxObserver"]:
        found = getattr(documented, name)
        assert issubclass(found, documented.ObserverBase)
        assert found.__name__ == name
    assert issubclass(documented.PerTensorMinMaxObserver, documented.UniformScalingObserver)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", TENSOR)
@settings(max_examples=12)
@given(data=st.data())
def test_merging_observers_of_a_tensor_equals_having_seen_both(name: str, symmetric: bool, data: st.DataObject) -> None:
    values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20).map(torch.tensor)
    a, b = data.draw(values), data.draw(values)
    merged = seen(name, a, symmetric=symmetric)
    merged.range()
    merged.merge(seen(name, b, symmetric=symmetric))
    assert same(merged, seen(name, b, a, symmetric=symmetric))
    assert same(merged, seen(name, torch.cat([a, b]), symmetric=symmetric))


@pytest.mark.parametrize("name", [*CHANNEL, *GROUP])
def test_merging_observers_of_rows_equals_having_seen_both(name: str) -> None:
    a, b = heavy_tailed(seed=1), heavy_tailed(seed=2)
    merged = seen(name, a, symmetric=False)
    merged.merge(seen(name, b, symmetric=False))
    assert same(merged, seen(name, b, a, symmetric=False))


@pytest.mark.parametrize("name", ONCE)
def test_observers_of_weights_refuse_a_second_tensor(name: str) -> None:
    x = heavy_tailed()
    observer = seen(name, x, torch.empty(0, 64))
    with pytest.raises(CalibrationError, match="is for weights"):
        observer.observe(x)
    with pytest.raises(CalibrationError, match="is for weights"):
        observer.merge(seen(name, x))


@pytest.mark.parametrize("name", [*TENSOR, *CHANNEL, *GROUP, *ONCE])
def test_merging_with_an_observer_that_has_seen_nothing_changes_nothing(name: str) -> None:
    x = heavy_tailed()
    expected = seen(name, x, symmetric=False)
    full, empty = seen(name, x, symmetric=False), seen(name, torch.empty(0, x.shape[1]), symmetric=False)
    full.merge(seen(name, torch.empty(0, x.shape[1]), symmetric=False))
    assert same(full, expected)
    empty.merge(full)
    assert same(empty, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", [*TENSOR, *CHANNEL, *ONCE])
def test_values_that_are_no_numbers_stay_visible(name: str, symmetric: bool, bad: float) -> None:
    x = heavy_tailed()
    x[3, 4] = bad
    low, high = seen(name, x, symmetric=symmetric).range()
    assert not torch.isfinite(torch.stack([low, high])).all()
    if name not in ONCE:
        later = seen(name, x, heavy_tailed(), symmetric=symmetric)
        later.merge(seen(name, heavy_tailed(), symmetric=symmetric))
        assert not torch.isfinite(torch.stack(later.range())).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", [*TENSOR, *CHANNEL, *ONCE])
def test_zeros_quantize_to_zeros_and_nothing_seen_is_an_error(name: str, symmetric: bool) -> None:
    quantizer = quantizer_of(name, symmetric=symmetric)
    y, qparams = quantizer.round_to_nearest(torch.zeros(4, 16))
    assert not y.any()
    assert torch.isfinite(qparams.scale).all()
    with pytest.raises(CalibrationError, match="has seen no data"):
        seen(name, torch.empty(4, 0), symmetric=symmetric).range()


@pytest.mark.parametrize("name", [n for n in [*TENSOR, *ONCE] if not n.endswith("TensorMinMaxObserver")])
def test_observers_refuse_another_granularity(name: str) -> None:
    other = {"qscheme": "per_block", "block_size": (4, 4), "ch_axis": None, "group_size": None}
    wrong = quantizer_for(attrs.evolve(spec_of(name), **other), activation=False).shape_error((8, 8))
    assert wrong is not None
    assert "supports per_" in wrong


def test_algorithms_get_powers_of_two_from_observers_of_powers_of_two() -> None:
    """Their ranges are not the extremes.

    By these `WeightGrid` would find other scales without asking them.
    """
    quantizer = quantizer_of("PerChannelPowOf2MinMaxObserver", "int4")
    weight = heavy_tailed(rows=8)
    scale = WeightGrid([quantizer], [8], weight.t().contiguous()).scales(weight.t().contiguous()).scale.flatten()
    assert torch.equal(scale, 2 ** scale.log2().round())
    assert torch.equal(scale, quantizer.find_qparams(weight).scale)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", [*TENSOR, *CHANNEL, *GROUP, *ONCE])
def test_a_float64_tensor_has_the_range_of_the_same_values_in_float32(name: str, symmetric: bool) -> None:
    x = heavy_tailed()
    assert same(seen(name, x.double(), symmetric=symmetric), seen(name, x, symmetric=symmetric))


def test_the_observer_of_casts_refuses_formats_with_scales() -> None:
    problem = quantizer_of("PlaceholderObserver").shape_error((8, 8))
    assert problem is not None
    assert "observes nothing" in problem


@pytest.mark.parametrize(("dtype", "observer"), [("int8", "PerTensorPercentileObserver"), ("fp8_e4m3", "PerTensorMSEObserver")])
def test_static_activations_are_calibrated_with_the_observer_of_their_spec(dtype: str, observer: str) -> None:
    options = {"percentile": 99.0} if "Percentile" in observer else {}
    activation = spec_of(observer, dtype, observer_options=options)
    model, batches = tiny_model(), calibration_batches(n=2, length=32)
    name = "model.layers.0.self_attn.q_proj"
    expected = quantizer_for(activation, activation=True).observer()
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: expected.observe(args[0]))
    with torch.no_grad():
        for ids in batches:
            model(ids)
    hook.remove()
    weight = spec_of("PerTensorMinMaxObserver", dtype)
    quantized = ModelQuantizer(QConfig(QLayerConfig(weight=weight, input_tensors=activation))).quantize_model(model, batches)
    layer = quantized.get_submodule(name)
    reach = 127.5 if dtype == "int8" else 448.0
    assert float(layer.input_quantizer.scale) == pytest.approx(float(expected.range()[1]) / reach)
    with torch.no_grad():
        assert torch.isfinite(quantized(batches[0]).logits).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", [*TENSOR, *CHANNEL, *ONCE, "PerGroupMinMaxObserver"])
def test_an_observer_made_of_a_spec_is_called_with_tensors_and_gives_the_scales_of_a_quantizer(name: str, symmetric: bool) -> None:
    spec, x = spec_of(name, symmetric=symmetric), heavy_tailed()
    expected = quantizer_for(spec, activation=False).find_qparams(x)
    for place in ((), (torch.device("cpu"),)):
        observer = getattr(documented, name)(spec, *place)
        assert observer(x) is x
        for scale, zero in (observer.calculate_qparams(*observer.range()), observer._calculate_qparams()):
            assert torch.equal(scale, expected.scale)
            assert torch.equal(zero, torch.zeros_like(zero) if expected.zero_point is None else expected.zero_point)
