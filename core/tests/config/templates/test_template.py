"""LLMTemplate: every argument, every documented error."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest

from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.config.templates import LLMTemplate, template_for
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnknownNameError, UnsupportedError
from quark.plugins import AlgorithmRecord, Catalog, algorithms, hookimpl, templates, using
from quark.plugins.discovery import Candidate, Source, discover

A8 = QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=False)


@attrs.define(kw_only=True)
class PassingConfig(AlgoConfig):
    name: str = "passing"


@attrs.define(kw_only=True)
class OtherConfig(AlgoConfig):
    name: str = "other"


def dtype_of(layer: QLayerConfig | None) -> str | None:
    weight = None if layer is None else layer.weight
    return weight.dtype.name if isinstance(weight, QTensorConfig) else None


def test_a_template_is_made_once_from_the_facts_of_its_family(template: LLMTemplate) -> None:
    assert template is LLMTemplate.get("acme_net")
    assert (template.kv_layers_name, template.q_layer_name) == (["*k_proj", "*v_proj"], "*q_proj")
    assert (template.exclude_layers_name, template.gate_up_layers_name) == (["head"], ["gate_proj", "up_proj"])
    assert "acme_net" in LLMTemplate.list_available()


def test_a_template_has_the_algorithms_that_are_registered_now() -> None:
    algorithms().register(AlgorithmRecord(name="passing", kind="rounding", config=f"{__name__}:PassingConfig"))
    try:
        assert "passing" in LLMTemplate.get("llama").algorithm_configs
    finally:
        algorithms().unregister("passing")
    assert "passing" not in LLMTemplate.get("llama").algorithm_configs


def test_a_template_has_the_algorithms_of_the_plugins_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("passing", "other"):  # as many records in both
        module = ModuleType(f"acme_{name}")
        record = AlgorithmRecord(name=name, kind="rounding", config=f"{__name__}:{name.capitalize()}Config")

        def quark_register_algorithms(*, records: Any = (record,)) -> Any:
            return records

        vars(module)["quark_register_algorithms"] = hookimpl(quark_register_algorithms)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        plugin = Candidate(Source(f"acme-{name}", "1", module.__name__, name), EntryPoint(name, module.__name__, "quark"))
        with using(Catalog((*discover(), plugin))):
            assert name in LLMTemplate.get("llama").algorithm_configs


def test_an_unknown_model_type_names_the_closest_and_how_to_make_one() -> None:
    with pytest.raises(ValueError, match="There is no model template defined for the model type 'acme_nett'") as caught:
        LLMTemplate.get("acme_nett")
    assert isinstance(caught.value, UnknownNameError)
    assert "Did you mean 'acme_net'" in str(caught.value)
    assert "register_template" in str(caught.value)


def test_the_scheme_and_the_exclusions_of_the_template_make_a_configuration(template: LLMTemplate) -> None:
    config = template.get_config(scheme="acme_w4")
    assert dtype_of(config.global_quant_config) == "int4"
    assert config.exclude == ["head"]
    assert config.kv_cache_group == ["*k_proj", "*v_proj"]
    assert config.algo_config is None
    assert config.kv_cache_quant_config == config.layer_quant_config == {}


def test_configurations_share_no_list_with_their_template(template: LLMTemplate) -> None:
    config = template.get_config(scheme="acme_w4")
    config.exclude.append("x")
    config.kv_cache_group.append("x")
    assert template.exclude_layers_name == ["head"]
    assert template.get_config(scheme="acme_w4").kv_cache_group == ["*k_proj", "*v_proj"]


def test_exclusions_given_take_the_place_of_the_templates_and_an_empty_list_excludes_nothing(template: LLMTemplate) -> None:
    assert template.get_config(scheme="acme_w4", exclude_layers=["a"]).exclude == ["a"]
    assert template.get_config(scheme="acme_w4", exclude_layers=[]).exclude == []


def test_an_alias_of_a_scheme_is_as_good_as_its_name(template: LLMTemplate) -> None:
    assert template.get_config(scheme="acme_four") == template.get_config(scheme="acme_w4")


def test_an_unknown_scheme_names_the_closest(template: LLMTemplate) -> None:
    with pytest.raises(ValueError, match=r"Unsupported quantization scheme: acme_w5; .*Did you mean 'acme_w4'"):
        template.get_config(scheme="acme_w5")


@pytest.mark.parametrize("argument", ["layer_config", "layer_type_config"])
def test_an_unknown_scheme_of_some_layers_is_refused_in_the_same_words(template: LLMTemplate, argument: str) -> None:
    with pytest.raises(UnknownNameError, match="Unsupported quantization scheme: acme_w5"):
        template.get_config(scheme="acme_w4", **{argument: {"*gate_proj": "acme_w5"}})


def test_layers_and_types_get_their_own_schemes(template: LLMTemplate) -> None:
    config = template.get_config(scheme="acme_w4", layer_config={"*.gate_proj": "acme_w8a8"}, layer_type_config={"Conv2d": "acme_w8a8"})
    assert {k: dtype_of(v) for k, v in config.layer_quant_config.items()} == {"*.gate_proj": "fp8_e4m3"}
    assert {k: dtype_of(v) for k, v in config.layer_type_quant_config.items()} == {"Conv2d": "fp8_e4m3"}


@pytest.mark.parametrize(("argument", "words"), [("kv_cache_scheme", "KV cache scheme"), ("attention_scheme", "attention scheme")])
@pytest.mark.parametrize("name", ["acme_w4", "nonsense"])
def test_a_scheme_that_cannot_hold_a_cache_or_attention_is_refused_and_those_that_can_are_listed(
    template: LLMTemplate, argument: str, words: str, name: str
) -> None:
    with pytest.raises(ValueError, match=f"Unsupported {words}: {name}.*acme_w8a8"):
        template.get_config(scheme="acme_w4", **{argument: name})


def test_a_plugin_whose_cache_spec_is_something_else_is_named(template: LLMTemplate) -> None:
    with pytest.raises(ConfigError, match="not a QTensorConfig"):
        template.get_config(scheme="acme_w4", kv_cache_scheme="acme_broken")


def test_a_floor_of_the_cache_scales_is_kept_and_a_negative_one_refused(template: LLMTemplate) -> None:
    assert template.get_config(scheme="acme_w4", min_kv_scale=1.0).min_kv_scale == 1.0
    with pytest.raises(ConfigError, match="negative"):
        template.get_config(scheme="acme_w4", min_kv_scale=-1.0)


def test_schemes_that_share_a_global_scale_bring_their_groups_unless_told_otherwise(template: LLMTemplate) -> None:
    config = template.get_config(scheme="acme_shared")
    assert config.shared_scale_groups == [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
    assert config.sync_moe_expert_input_amax
    off = template.get_config(scheme="acme_shared", shared_scale_groups=[])
    assert (off.shared_scale_groups, off.sync_moe_expert_input_amax) == ([], False)
    own = template.get_config(scheme="acme_w4", shared_scale_groups=[["w1", "w3"]])
    assert own.shared_scale_groups == [["w1", "w3"]]
    assert template.get_config(scheme="acme_w4").shared_scale_groups == []


def test_what_shares_a_global_scale_is_what_the_architecture_names(template: LLMTemplate) -> None:
    def groups(**facts: Any) -> list[list[str]]:
        architecture = Architecture(model_type="acme", gate_up_layers_name=("w1", "w3"), **facts)
        return LLMTemplate.from_architecture(architecture).get_config(scheme="acme_shared").shared_scale_groups

    separate = {"query_projections": "attn.wq", "key_projections": ("attn.wk", "cross.wk"), "value_projections": "attn.wv"}
    assert groups(**separate) == [["wq", "wk", "wv"], ["w1", "w3"]]
    for facts in ({}, separate | {"key_projections": ()}):
        assert groups(**facts) == [["q_proj", "k_proj", "v_proj"], ["w1", "w3"]]


def test_algorithms_keep_their_order_and_are_known_in_any_case_and_by_alias(template: LLMTemplate) -> None:
    config = template.get_config(scheme="acme_w4", algorithm=["ACME_WALKS"])
    assert [a.name for a in config.algo_config or []] == ["acme_runs"]
    assert config.algo_config[0].blocks == "net.blocks"  # type: ignore[index, attr-defined]


def test_settings_given_take_the_place_of_the_templates(template: LLMTemplate) -> None:
    own = type(template.algo_config["acme_runs"])(strength=0.5)  # type: ignore[misc]
    config = template.get_config(scheme="acme_w4", algorithm="acme_runs", algo_configs={"Acme_Runs": own})
    assert config.algo_config == [own]
    assert template.algo_config["acme_runs"] != own


def test_an_algorithm_without_settings_for_the_family_says_how_to_give_them(template: LLMTemplate) -> None:
    with pytest.raises(NotImplementedError, match="No built-in acme_bare configuration is available for the 'acme_net' architecture"):
        template.get_config(scheme="acme_w4", algorithm="acme_bare")


def test_an_algorithm_of_which_only_the_configuration_is_installed_is_refused(template: LLMTemplate) -> None:
    with pytest.raises(UnsupportedError, match=r"'acme_talks' cannot run: .* registers its configuration only"):
        template.get_config(scheme="acme_w4", algorithm="acme_talks")


def test_an_unknown_algorithm_names_the_closest(template: LLMTemplate) -> None:
    with pytest.raises(ValueError, match=r"Unsupported algorithm: acme_run; .*Did you mean 'acme_runs'"):
        template.get_config(scheme="acme_w4", algorithm="acme_run")


@pytest.mark.parametrize(
    "keywords",
    [
        {"kv_layer_name": ["*kv_b_proj"], "exclude_layers": ["lm_head"]},
        {"kv_layers_name": ["*kv_b_proj"], "exclude_layers_name": ["lm_head"]},
    ],
)
def test_keywords_of_every_generation_make_the_same_template(keywords: dict[str, list[str]]) -> None:
    template = LLMTemplate(model_type="mine", **keywords)  # type: ignore[arg-type]
    assert (template.kv_layers_name, template.exclude_layers_name) == (["*kv_b_proj"], ["lm_head"])
    config = template.get_config(scheme="acme_w8a8", kv_cache_scheme="acme_w8a8")
    assert list(config.kv_cache_quant_config) == ["*kv_b_proj"]


def test_a_keyword_given_under_both_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="both kv_layers_name and its old name"):
        LLMTemplate("mine", kv_layers_name=["a"], kv_layer_name=["b"])


def test_legacy_algorithm_keywords_are_taken_with_a_warning(caplog: pytest.LogCaptureFixture, template: LLMTemplate) -> None:
    own = template.algo_config["acme_runs"]
    with caplog.at_level(logging.WARNING, logger="quark"):
        made = LLMTemplate("mine", acme_runs_config=own)
    assert made.algo_config["acme_runs"] is own
    assert "acme_runs_config" in caplog.text
    assert "algorithm_configs" in caplog.text


def test_a_misspelt_keyword_of_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Unsupported legacy algorithm keyword 'kv_layer_names'.*kv_layers_name"):
        LLMTemplate("mine", kv_layer_names=None)


def test_an_unknown_algorithm_in_a_template_is_refused(template: LLMTemplate) -> None:
    with pytest.raises(ValueError, match="Unsupported algorithm 'nonsense' in `algorithm_configs`"):
        LLMTemplate("mine", algorithm_configs={"nonsense": None})
    with pytest.raises(ValueError, match="Unsupported algorithm 'nonsense' in `algo_configs`"):
        template.get_config(scheme="acme_w4", algo_configs={"nonsense": None})  # type: ignore[dict-item]


def test_a_template_registered_by_hand_is_found_and_replaces_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    first, second = LLMTemplate("mine"), LLMTemplate("mine")
    LLMTemplate.register_template(first)
    assert LLMTemplate.get("mine") is first
    assert LLMTemplate.list_available()[-1] == "mine"
    assert templates().get("mine").name == "mine"
    with caplog.at_level(logging.WARNING, logger="quark"):
        LLMTemplate.register_template(second)
    assert LLMTemplate.get("mine") is second
    assert "Template 'mine' already registered, will overwrite the existing template" in caplog.text


def test_the_template_of_a_model_configuration_is_found_by_type_else_by_architecture(template: LLMTemplate) -> None:
    assert template_for(SimpleNamespace(model_type="acme_net")) is template
    assert template_for({"model_type": "acme_net"}) is template
    assert template_for({"architectures": ["acme_net"]}) is template
    with pytest.raises(ConfigError, match="neither 'model_type' nor 'architectures'"):
        template_for({})
