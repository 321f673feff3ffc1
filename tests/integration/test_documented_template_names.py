"""Names of the documented template module, and the parser of configurations, as its code uses them."""

from __future__ import annotations

import pytest

import quark
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.torch import LLMTemplate
from quark.torch.export import JsonExporterConfig
from quark.torch.export.main_export.quant_config_parser import QuantConfigParser
from quark.torch.quantization.config.template import (
    _ATTN_TOKENS,
    DEFAULT_TEMPLATES,
    _create_template_from_config,
    _resolve_projection_base_spec,
)

GLOBAL, OTHER = (LLMTemplate.get("llama").get_config(scheme=scheme).global_quant_config for scheme in ("fp8", "int4_wo_64"))


def test_the_default_templates_are_those_that_are_registered() -> None:
    assert list(DEFAULT_TEMPLATES) == list(quark.templates().names())
    assert len(DEFAULT_TEMPLATES) == len(quark.templates().names()) > 20
    assert DEFAULT_TEMPLATES["llama"]["kv_layers_name"] == ["*k_proj", "*v_proj"]
    assert DEFAULT_TEMPLATES["llama"]["exclude_layers_name"] == ["lm_head"]
    with pytest.raises(KeyError):
        DEFAULT_TEMPLATES["no such family"]


@pytest.mark.parametrize("model_type", ["llama", "opt", "dbrx", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a_template_made_of_its_dict_gives_what_the_registered_one_gives(model_type: str) -> None:
    made, registered = _create_template_from_config(model_type, DEFAULT_TEMPLATES[model_type]), LLMTemplate.get(model_type)
    assert made.algo_config == registered.algo_config
    for scheme in ("int4_wo_64", "nvfp4"):
        found, wanted = (t.get_config(scheme=scheme, kv_cache_scheme="fp8") for t in (made, registered))
        assert found.shared_scale_groups == wanted.shared_scale_groups
        assert found.global_quant_config == wanted.global_quant_config
        assert set(found.exclude) <= set(wanted.exclude)


@pytest.mark.parametrize(
    ("patterns", "pattern", "base"),
    [
        ([], "*k_proj", GLOBAL),
        (["*mlp*"], "*k_proj", GLOBAL),
        (["*k_proj"], "*k_proj", OTHER),
        (["model.layers.5.self_attn.k_proj"], "*k_proj", OTHER),
        *([(f"*{token}*",), "*k_proj", OTHER] for token in _ATTN_TOKENS),
    ],
)
def test_the_base_of_a_projection_is_guessed_as_documented(patterns: list[str], pattern: str, base: QLayerConfig) -> None:
    config = QConfig(global_quant_config=GLOBAL, layer_quant_config=dict.fromkeys(patterns, OTHER))
    assert _resolve_projection_base_spec(config, pattern) is base


def test_the_parser_of_configurations_takes_a_configuration_and_its_export() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="fp8", kv_cache_scheme="fp8")
    parser = QuantConfigParser(config, JsonExporterConfig(kv_cache_group=["*k_proj"]))
    assert parser.kv_cache_group == ["*k_proj"]
    assert not parser.output_quant
    assert parser.get_custom_config() == ({}, "quark")
    assert QuantConfigParser(QConfig(QLayerConfig(output_tensors=GLOBAL.input_tensors))).output_quant
