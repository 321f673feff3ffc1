"""Static activation scales: layers that share one, the time when it is set, and the observed ranges."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.calibration.activation_scales import INPUT, OUTPUT, ActivationScales, kv_scale_groups, merge_kv_scales
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError
from quark.models.layers import QuantizedLayer
from quark.models.layers.quantized_layers import QuantLinear

FP8 = QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", observer_cls="PerTensorMinMaxObserver", symmetric=True, is_dynamic=False)
K, V = "layers.0.k_proj", "layers.0.v_proj"


def scales_of(config: QConfig, *names: str) -> tuple[ActivationScales, dict[str, QuantizedLayer]]:
    """The activations of linear layers with a static input and a static output."""
    layer = QLayerConfig(input_tensors=FP8, output_tensors=FP8)
    layers: dict[str, QuantizedLayer] = {name: QuantLinear.from_float(nn.Linear(4, 4), layer) for name in names}
    return ActivationScales(layers, (), config), layers


def cache_config(**fields: object) -> QConfig:
    layer = QLayerConfig(output_tensors=FP8)
    return QConfig(QLayerConfig(), kv_cache_quant_config={"*k_proj": layer, "*v_proj": layer}, **fields)  # type: ignore[arg-type]


def output_scale(layer: QuantizedLayer) -> float:
    assert layer.output_quantizer is not None
    assert layer.output_quantizer.scale is not None
    return float(layer.output_quantizer.scale)


def input_scale(layer: QuantizedLayer) -> float:
    assert layer.input_quantizer is not None
    assert layer.input_quantizer.scale is not None
    return float(layer.input_quantizer.scale)


def test_keys_and_values_have_the_larger_of_their_scales() -> None:
    scales, layers = scales_of(cache_config(), K, V)
    assert list(scales.sharing_outputs()) == [(K, V)]
    scales.see(K, OUTPUT, torch.tensor([1.0, -448.0]))
    scales.see(V, OUTPUT, torch.tensor([896.0]))
    scales.set_scales([(K, OUTPUT)])
    assert [output_scale(layers[name]) for name in (K, V)] == pytest.approx([2.0, 2.0])
    assert not scales.wants(V, OUTPUT), "it was set with the other"


@pytest.mark.parametrize(("later", "expected"), [(448.0, 3.0), (4 * 448.0, 4.0)])
def test_a_scale_of_the_cache_that_is_set_already_counts_for_those_that_come_later_and_stays(later: float, expected: float) -> None:
    scales, layers = scales_of(cache_config(), K, V)
    scales.see(K, OUTPUT, torch.tensor([3 * 448.0]))
    scales.set_scales([(K, OUTPUT)])
    assert scales.wants(V, OUTPUT), "it has seen nothing yet"
    scales.see(V, OUTPUT, torch.tensor([later]))
    scales.set_scales([(V, OUTPUT)])
    assert output_scale(layers[V]) == pytest.approx(expected)
    assert output_scale(layers[K]) == pytest.approx(3.0)


def test_scales_of_the_cache_are_separate_where_the_configuration_says_so_and_never_below_its_floor() -> None:
    scales, layers = scales_of(cache_config(separate_kv_scales=True, min_kv_scale=1.5), K, V)
    scales.see(K, OUTPUT, torch.tensor([448.0]))
    scales.see(V, OUTPUT, torch.tensor([896.0]))
    scales.set_scales([(K, OUTPUT), (V, OUTPUT)])
    assert [output_scale(layers[name]) for name in (K, V)] == pytest.approx([1.5, 2.0])
    assert list(scales.sharing_outputs()) == []


def test_an_activation_is_observed_until_it_has_its_scale() -> None:
    scales, layers = scales_of(QConfig(QLayerConfig()), K)
    assert bool(scales)
    assert scales.wants(K, INPUT)
    assert not scales.wants("another", INPUT)
    scales.see(K, INPUT, torch.tensor([448.0]))
    scales.see("another", INPUT, torch.tensor([1e6]))
    scales.set_scales([(K, INPUT)])
    assert not scales.wants(K, INPUT)
    scales.see(K, INPUT, torch.tensor([4480.0]))
    scales.set_scales([(K, INPUT)])
    assert input_scale(layers[K]) == pytest.approx(1.0)
    scales.forget(K)
    assert scales.wants(K, INPUT)
    with pytest.raises(CalibrationError):
        scales.set_scales([(K, INPUT)])
    scales.see(K, INPUT, torch.tensor([896.0]))
    scales.set_scales([(K, INPUT)])
    assert input_scale(layers[K]) == pytest.approx(2.0)


EXPERTS = tuple(f"layers.0.mlp.experts.{number}.up_proj" for number in range(3))


@pytest.mark.parametrize("pooled", [False, True])
def test_experts_without_tokens_have_the_scale_of_the_others(pooled: bool) -> None:
    scales, layers = scales_of(QConfig(QLayerConfig(), sync_moe_expert_input_amax=pooled), *EXPERTS)
    for number, value in enumerate((448.0, 896.0)):
        scales.see(EXPERTS[number], INPUT, torch.tensor([value]))
    for name in EXPERTS:
        scales.see(name, OUTPUT, torch.ones(1))
    assert [key[0] for key in scales.pool_of(EXPERTS[0])] == (list(EXPERTS) if pooled else [])
    scales.finish()
    assert [input_scale(layers[name]) for name in EXPERTS] == pytest.approx([2.0, 2.0, 2.0] if pooled else [1.0, 2.0, 2.0])


def test_groups_of_the_cache_are_those_of_one_attention_among_the_layers_that_feed_it() -> None:
    names = ["layers.0.k_proj", "layers.0.v_proj", "layers.0.o_proj", "layers.1.v_proj"]
    patterns = ["*k_proj", "*v_proj"]
    assert kv_scale_groups(names, patterns) == [("layers.0.k_proj", "layers.0.v_proj"), ("layers.1.v_proj",)]
    assert kv_scale_groups(names, patterns, separate=True) == [("layers.0.k_proj",), ("layers.0.v_proj",), ("layers.1.v_proj",)]
    merged = merge_kv_scales([torch.tensor([0.5]), torch.tensor(2.0)], 1.0)
    assert merged.shape == ()
    assert float(merged) == 2.0
    assert float(merge_kv_scales([torch.tensor(0.5)], 1.0)) == 1.0
