"""Names that a program registers at run time appear in every listing, option, suggestion and message."""

from __future__ import annotations

import logging

import pytest
from torch import nn

import quark
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.templates import LLMTemplate
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnknownNameError
from quark.models.plan.quant_plan import make_plan
from quark.plugins.catalog import catalog
from quark_amd.default_templates import DEFAULT_TEMPLATES
from quark_workbench.cli.installed import kind_report, record_report

W4 = QTensorConfig(dtype="int4", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=False)
A8 = QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=False)
STATIC = QLayerConfig(weight=A8, input_tensors=A8)


def test_a_scheme_is_in_the_registry_the_listing_and_the_suggestions(template: LLMTemplate) -> None:
    LLMTemplate.register_scheme("mine", STATIC)
    assert "mine" in quark.schemes()
    assert quark.schemes().load_config("mine")() == STATIC
    assert quark.schemes().source("mine").distribution == "run-time"
    entry = next(e for e in kind_report(catalog(), "schemes")["schemes"] if e["name"] == "mine")
    assert (entry["status"], entry["weight"], entry["summary"]) == ("active", "fp8_e4m3/tensor", "registered by this program")
    with pytest.raises(UnknownNameError, match="Did you mean 'mine'"):
        quark.schemes().get("mien")
    assert template.get_config("acme_w4", layer_config={"*": "mine"}).layer_quant_config["*"] == STATIC
    LLMTemplate.unregister_scheme("mine")
    assert "mine" not in quark.schemes()


def test_a_scheme_of_static_activations_serves_cache_and_attention(template: LLMTemplate) -> None:
    LLMTemplate.register_scheme("mine", STATIC)
    config = template.get_config("acme_w4", kv_cache_scheme="mine", attention_scheme="mine")
    assert {layer.output_tensors for layer in config.kv_cache_quant_config.values()} == {A8}
    assert config.softmax_quant_spec == A8


@pytest.mark.parametrize("inputs", [None, QTensorConfig(dtype="int8", qscheme="per_tensor", is_dynamic=True), [A8, A8]])
def test_a_scheme_without_one_static_level_cannot_hold_a_cache(inputs: QTensorConfig | None, template: LLMTemplate) -> None:
    LLMTemplate.register_scheme("mine", QLayerConfig(weight=W4, input_tensors=inputs))
    with pytest.raises(UnknownNameError, match="Unsupported KV cache scheme: mine"):
        template.get_config("acme_w4", kv_cache_scheme="mine")


def test_a_scheme_that_fits_is_offered_where_another_does_not() -> None:
    by_48 = QTensorConfig(dtype="int4", qscheme="per_group", ch_axis=-1, group_size=48, symmetric=True, is_dynamic=False)
    by_40 = QTensorConfig(dtype="int4", qscheme="per_group", ch_axis=-1, group_size=40, symmetric=True, is_dynamic=False)
    LLMTemplate.register_scheme("by forty", QLayerConfig(weight=by_40))
    with pytest.raises(ConfigError, match="by forty"):
        make_plan(nn.Sequential(nn.Linear(40, 8)), QConfig(global_quant_config=QLayerConfig(weight=by_48)), None)


def test_a_name_with_a_colon_is_refused() -> None:
    with pytest.raises(ConfigError, match="separates distribution and name"):
        LLMTemplate.register_scheme("acme:mine", STATIC)
    with pytest.raises(ConfigError, match="separates distribution and name"):
        LLMTemplate.register_template(LLMTemplate("acme:mine"))


def test_a_template_is_in_the_registry_and_the_listing_with_or_without_facts() -> None:
    LLMTemplate.register_template(LLMTemplate("mine"))
    assert "mine" in quark.templates()
    assert "mine" not in DEFAULT_TEMPLATES
    assert quark.templates().find_architecture("mine") is None
    assert record_report(catalog(), "templates", "mine")["entry"]["status"] == "active"
    facts = quark.templates().load_architecture("acme_net")
    LLMTemplate.register_template(LLMTemplate("facts", architecture=facts))
    assert quark.templates().load_architecture("facts") is facts


def test_a_template_in_place_of_a_plugins_keeps_the_facts_of_the_family(template: LLMTemplate, caplog: pytest.LogCaptureFixture) -> None:
    facts = quark.templates().load_architecture("acme_net")
    with caplog.at_level(logging.WARNING, logger="quark"):
        for _ in range(2):
            own = LLMTemplate("acme_net", exclude_layers_name=["*"])
            LLMTemplate.register_template(own)
            assert LLMTemplate.get("acme_net") is own
            assert quark.templates().load_architecture("acme_net") is facts
    assert caplog.text.count("'acme_net' already registered") == 2
    assert LLMTemplate.list_available().count("acme_net") == 1
    assert DEFAULT_TEMPLATES["acme_net"]["exclude_layers_name"] == ["head"]
    assert "acme_net" in list(DEFAULT_TEMPLATES)
    quark.templates().unregister("acme_net")
    assert LLMTemplate.get("acme_net") is template
