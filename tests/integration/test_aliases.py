"""Modules and parameters that a model has at several places are quantized at all of them, and stay shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.layers import QuantLinear
from quark.models.plan.plan_text import plan_lines
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization import Int8PerTensorSpec
from tests.kit.small_families import float_outputs
from tests.test_every_family import CODES, aliases

PLACES = 5
FP8 = QLayerConfig(weight=CODES["fp8"])
X = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A model of linear layers, each in a part of its own.

    Args:
        modules: The place whose module each place has.
        weights: The place whose weight the module of each place has.
        biases: The same for biases.
    """

    def __init__(self, modules: list[int], weights: list[int], biases: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear: list[nn.Linear] = [nn.Linear(32, 32) for _ in range(PLACES)]
        for layer, weight, bias in zip(linear, weights, biases, strict=True):
            layer.weight, layer.bias = linear[weight].weight, linear[bias].bias
        self.parts = nn.ModuleList(nn.Sequential(linear[place]) for place in modules)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = self.norm(torch.tanh(part(x)) + x)
        return x


def modules_at_two_places(model: nn.Module) -> set[frozenset[str]]:
    names: dict[nn.Module, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def distinct(values: list[int]) -> list[int]:
    """Let places point at places that point at themselves."""
    return [values[place] if values[values[place]] == values[place] else place for place in values]


PATTERN = st.lists(st.integers(0, PLACES - 1), min_size=PLACES, max_size=PLACES).map(distinct)


@settings(max_examples=30)
@given(modules=PATTERN, weights=PATTERN, biases=PATTERN, floats=st.sets(st.integers(0, PLACES - 1), max_size=2))
def test_any_pattern_of_shared_modules_and_parameters_is_written_and_read(
    modules: list[int], weights: list[int], biases: list[int], floats: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    excluded = [f"parts.{i}.0" for i, place in enumerate(modules) if place in {modules[j] for j in floats}]
    given_model = Net(modules, weights, biases)
    shared, tied = modules_at_two_places(given_model), aliases(given_model)
    model = ModelQuantizer(QConfig(FP8, exclude=excluded)).quantize_model(given_model)
    assert [isinstance(part[0], QuantLinear) for part in model.parts] == [f"parts.{i}.0" not in excluded for i in range(PLACES)]
    assert {group for group in modules_at_two_places(model) if not any("quantizer" in name for name in group)} == shared
    out = tmp_path_factory.mktemp("out")
    export_safetensors(model, out)
    expected = model(X)
    for packed in (False, True):
        back = import_model_from_safetensors(Net(modules, weights, biases), out, packed=packed)
        assert torch.equal(back(X), expected)
        assert {group for group in modules_at_two_places(back) if not any("quantizer" in name for name in group)} == shared
        if not packed:  # the weights of layers that run from codes are parameters anew for each look
            assert all(any(group <= again for again in aliases(back)) for group in aliases(model) & tied)
        alone = import_model_from_safetensors(Net(*[list(range(PLACES))] * 3), out, packed=packed)
        assert torch.equal(alone(X), expected), "a model of the same structure that shares nothing"


def test_the_plan_shows_one_module_at_two_places_as_one() -> None:
    model = ModelQuantizer(QConfig(FP8)).quantize_model(Net([0, 1, 0, 3, 4], [*range(5)], [*range(5)]))
    plan = model.quark_plan
    assert {row.name: row.same_as for row in plan.rows if row.same_as} == {"parts.2.0": "parts.0.0"}
    assert len(plan.distinct) == len(plan.quantized) - 1
    assert any("parts.2.0 = parts.0.0" in line for line in plan_lines(plan))


def test_a_module_that_is_to_be_quantized_in_two_ways_is_refused() -> None:
    net = Net([0, 1, 0, 3, 4], [*range(5)], [*range(5)])
    with pytest.raises(ConfigError, match=r"'parts\.2\.0' and 'parts\.0\.0' are one module.*match both names or neither"):
        ModelQuantizer(QConfig(FP8, exclude=["parts.2.*"])).quantize_model(net)
    assert not any(isinstance(module, QuantLinear) for module in net.modules())


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    # A cache would have the keys of a module that is called twice in one place.
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False)).eval()
    return model


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8"])
@pytest.mark.parametrize("algorithm", [None, "gptq"])
@pytest.mark.parametrize("path", ["mlp.gate_proj", "mlp", "self_attn.k_proj", ""])
def test_modules_that_blocks_share_are_quantized_in_both(path: str, algorithm: str | None, scheme: str, tmp_path: Path) -> None:
    model: Any = llama()
    if path:
        model.model.layers[2].set_submodule(path, model.model.layers[0].get_submodule(path))
    else:
        model.model.layers[2] = model.model.layers[0]
    config = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=algorithm)
    data = [torch.randint(3, 128, (1, 32), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    ModelQuantizer(config).quantize_model(model, data)
    first, last = (model.model.layers[i].get_submodule(path) for i in (0, 2))
    assert first is last
    assert all(isinstance(layer, QuantLinear) for layer in model.model.layers.modules() if isinstance(layer, nn.Linear))
    export_safetensors(model, tmp_path)
    expected = float_outputs(model)[0]
    for back in (LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto"), import_model_from_safetensors(None, tmp_path)):
        assert torch.equal(float_outputs(back)[0], expected)


SIZES = {"vocab_size": 128, "d_model": 64, "num_layers": 1, "decoder_start_token_id": 0}
TIED: dict[str, tuple[type[Any], Any]] = {
    "bart": (
        BartForConditionalGeneration,
        BartConfig(**SIZES, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64),
    ),
    "bert": (BertForMaskedLM, BertConfig(vocab_size=128, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)),
    "switch": (SwitchTransformersForConditionalGeneration, SwitchTransformersConfig(**SIZES, d_kv=16, d_ff=64, num_heads=4, num_experts=4)),
    "t5": (T5ForConditionalGeneration, T5Config(**SIZES, d_kv=16, d_ff=64, num_heads=4)),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, tie_word_embeddings=True),
    ),
}


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("family", TIED)
def test_a_quantized_head_is_untied_alone(family: str, embeddings: bool, tmp_path: Path) -> None:
    kind, config = TIED[family]
    torch.manual_seed(0)
    int8 = QLayerConfig(weight=Int8PerTensorSpec(is_dynamic=False).to_quantization_spec())
    asked = QConfig(int8, layer_type_quant_config={nn.Embedding: int8} if embeddings else {})
    given_model = kind(config).eval()
    before = aliases(given_model)
    model = ModelQuantizer(asked).quantize_model(given_model)
    assert before
    kept, expected = aliases(model), float_outputs(model)
    export_safetensors(model, tmp_path)
    back, report = kind.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    for loaded in (back, import_model_from_safetensors(kind(config), tmp_path)):
        assert all(torch.equal(one, other) for one, other in zip(float_outputs(loaded), expected, strict=True))
        assert all(any(names <= again for again in aliases(loaded)) for names in kept)
