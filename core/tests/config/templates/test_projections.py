"""Quantized caches and attention leave each projection's own configuration, whatever the earlier patterns."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.templates import LLMTemplate
from quark.config.templates.projections import covers
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.models.plan.rules import layer_config_for

NAMES = [f"net.blocks.{i}.attn.{p}_proj" for i in range(3) for p in "qkvo"] + [f"net.blocks.{i}.mlp.up" for i in range(3)] + ["head"]


def resolved(config: QConfig) -> dict[str, QLayerConfig | None]:
    return {name: layer_config_for(config, name, nn.Linear).config for name in NAMES}


def weight_name(layer: QLayerConfig | None) -> str | None:
    return layer.weight.dtype.name if layer is not None and isinstance(layer.weight, QTensorConfig) else None


OPTIONS = [
    {},
    {"layer_config": {"*attn*": "acme_w8a8"}},
    {"layer_config": {"*k_proj": "acme_w8a8"}},
    {"layer_config": {"net.blocks.0.*": "acme_w8a8"}},
    {"layer_config": {"net.blocks.0.*": "acme_w8a8", "*attn.k_proj": "acme_w4"}},
    {"layer_config": {"net.blocks.[01].attn.?_proj": "acme_w8a8"}},
    {"layer_type_config": {nn.Linear: "acme_w8a8"}},
    {"layer_type_config": {"Linear": "acme_w8a8"}, "layer_config": {"*blocks.1*": "acme_w4"}},
    {"exclude_layers": ["*blocks.0*"]},
    {"exclude_layers": ["net.blocks.0.attn.k_proj", "head"]},
    {"exclude_layers": ["*attn*"]},
    {"exclude_layers": ["*k_proj"], "layer_config": {"*v_proj": "acme_w8a8"}},
    {"exclude_layers": []},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_quantized_cache_adds_outputs_to_keys_and_values_and_changes_nothing_else(template: LLMTemplate, options: dict) -> None:
    without = resolved(template.get_config(scheme="acme_w4", **options))
    config = template.get_config(scheme="acme_w4", kv_cache_scheme="acme_w8a8", **options)
    for name, layer in resolved(config).items():
        before = without[name] or QLayerConfig()
        if name.endswith(("k_proj", "v_proj")):
            assert layer is not None
            assert layer.output_tensors == next(iter(config.kv_cache_quant_config.values())).output_tensors
            assert (layer.weight, layer.input_tensors) == (before.weight, before.input_tensors)
        else:
            assert layer == without[name]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_quantized_attention_keeps_weights_and_inputs(template: LLMTemplate, options: dict) -> None:
    without = resolved(template.get_config(scheme="acme_w4", **options))
    config = template.get_config(scheme="acme_w4", attention_scheme="acme_w8a8", **options)
    assert config.softmax_quant_spec is not None
    for name, layer in resolved(config).items():
        before = without[name]
        assert (layer and layer.weight, layer and layer.input_tensors) == (before and before.weight, before and before.input_tensors)
        if not name.endswith("q_proj") or before is None:
            assert layer == before


@pytest.mark.parametrize("options", [{}, {"layer_config": {"*attn*": "acme_w8a8"}}, {"layer_config": {"*q_proj": "acme_w8a8"}}], ids=str)
def test_queries_are_quantized_even_where_a_pattern_covers_them_all(template: LLMTemplate, options: dict) -> None:
    config = template.get_config(scheme="acme_w4", attention_scheme="acme_w8a8", **options)
    outputs = {name: layer and layer.output_tensors for name, layer in resolved(config).items() if name.endswith("q_proj")}
    assert set(outputs.values()) == {config.softmax_quant_spec}


def test_the_documented_entries_for_the_cache_are_in_both_tables(template: LLMTemplate) -> None:
    config = template.get_config(scheme="acme_w8a8", kv_cache_scheme="acme_w8a8")
    assert list(config.kv_cache_quant_config) == list(config.layer_quant_config) == ["*k_proj", "*v_proj"]
    entry = config.kv_cache_quant_config["*k_proj"]
    assert entry == config.layer_quant_config["*k_proj"]
    assert entry.weight == entry.input_tensors == config.global_quant_config.weight


def test_the_entries_for_a_cache_of_excluded_projections_have_outputs_only(template: LLMTemplate) -> None:
    config = template.get_config(scheme="acme_w8a8", kv_cache_scheme="acme_w8a8", exclude_layers=["*attn*"])
    entry = config.kv_cache_quant_config["*k_proj"]
    assert entry.weight is entry.input_tensors is None
    assert entry.output_tensors is not None


def test_the_entries_take_over_a_pattern_that_covers_them_in_every_block_but_not_one_of_a_single_block(template: LLMTemplate) -> None:
    every = template.get_config(scheme="acme_w4", kv_cache_scheme="acme_w8a8", layer_config={"*attn*": "acme_w8a8"})
    single = template.get_config(scheme="acme_w4", kv_cache_scheme="acme_w8a8", layer_config={"net.blocks.0.attn*": "acme_w8a8"})
    assert weight_name(every.kv_cache_quant_config["*k_proj"]) == "fp8_e4m3"
    assert weight_name(single.kv_cache_quant_config["*k_proj"]) == "int4"


def test_excluded_queries_stay_as_they_are(template: LLMTemplate) -> None:
    config = template.get_config(scheme="acme_w4", attention_scheme="acme_w8a8", exclude_layers=["*attn*"])
    assert config.layer_quant_config == {}


def test_a_cache_without_layers_that_feed_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="no kv_layers_name"):
        LLMTemplate("mine").get_config(scheme="acme_w4", kv_cache_scheme="acme_w8a8")


def test_a_family_that_feeds_cache_and_queries_from_one_matrix_is_quantized_once() -> None:
    fused = LLMTemplate("mine", kv_layers_name=["*qkv_proj"], q_layer_name="*qkv_proj")
    config = fused.get_config(scheme="acme_w4", kv_cache_scheme="acme_w8a8", attention_scheme="acme_w8a8")
    assert list(config.layer_quant_config) == ["*qkv_proj"]
    assert weight_name(config.layer_quant_config["*qkv_proj"]) == "int4"


PATTERNS = st.text("ab*?.", max_size=5)


@given(PATTERNS, PATTERNS, st.lists(st.text("ab.", max_size=3), min_size=5, max_size=5))
def test_a_pattern_that_covers_another_matches_whatever_that_one_matches(pattern: str, symbolic: str, fills: list[str]) -> None:
    name = symbolic
    for fill in fills:
        name = name.replace("*", fill, 1)
    name = name.replace("?", "a").replace("*", "")
    assert fnmatchcase(name, symbolic)
    if covers(pattern, symbolic):
        assert fnmatchcase(name, pattern)
