"""A run has its own copy of the configuration.

It changes none, and what is changed later does not change the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, tiny_model, tiny_model_dir

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"scheme": "int4_wo_64"},
    "cache and attention": {"scheme": "fp8", "kv_cache_scheme": "fp8", "attention_scheme": "fp8"},
    "two levels": {"scheme": "int4_fp8"},
    "shared scales": {"scheme": "nvfp4"},
    "gptq": {"scheme": "int4_wo_64", "algorithm": "gptq"},
    "awq": {"scheme": "int4_wo_64", "algorithm": "awq"},
    "awq of two levels": {"scheme": "int4_fp8", "algorithm": "awq"},
    "rotation": {"scheme": "int4_wo_64", "algorithm": "rotation"},
}


def config_of(name: str) -> QConfig:
    return LLMTemplate.get("llama").get_config(**OPTIONS[name])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_run_changes_the_configuration_that_it_is_given(name: str, tmp_path: Path) -> None:
    config, before = config_of(name), config_of(name)
    model = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(2, 32))
    assert config == before
    export_safetensors(model, tmp_path / "out")
    quantize_checkpoint(tiny_model_dir(), tmp_path / "other", config, calibration_batches(2, 32))
    assert config == before
    model.quark_plan.config.global_quant_config.weight = None
    assert config == before


def test_a_configuration_that_is_changed_after_planning_or_during_a_run_has_no_effect() -> None:
    expected = ModelQuantizer(config_of("gptq")).quantize_model(tiny_model(), calibration_batches(4, 32))
    config = config_of("gptq")
    plan = ModelQuantizer(config).plan(tiny_model())

    def batches() -> Iterator[Tensor]:
        first, *others = calibration_batches(4, 32)
        yield first
        config.global_quant_config.weight.set_group_size(32)
        config.exclude.append("*mlp*")
        config.algo_config[0].damp_percent = 0.5
        yield from others

    class Changing(nn.Module):
        """Changes the configuration again in the middle of the run."""

        def forward(self, *args: Any, **kwargs: Any) -> None:
            config.global_quant_config.weight.set_group_size(16)

    model = tiny_model()
    model.model.layers[1].register_forward_pre_hook(Changing())
    ModelQuantizer(config).quantize_model(model, batches())
    assert config.global_quant_config.weight.group_size == 16
    assert plan.rows == ModelQuantizer(config_of("gptq")).plan(tiny_model()).rows
    assert model.quark_plan.config == plan.config == expected.quark_plan.config
    found, wanted = model.state_dict(), expected.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_two_entries_of_a_quantized_cache_can_be_changed_apart() -> None:
    config = config_of("cache and attention")
    config.layer_quant_config["*k_proj"].weight = None
    assert config.kv_cache_quant_config["*k_proj"].weight is not None


def test_a_scheme_registered_at_run_time_is_not_changed_through_a_configuration() -> None:
    own = config_of("plain").global_quant_config
    LLMTemplate.register_scheme("own_scheme", own)
    try:
        config = LLMTemplate.get("llama").get_config(scheme="own_scheme")
        config.global_quant_config.weight.set_group_size(32)
        own.weight.set_group_size(16)
        assert LLMTemplate.get("llama").get_config(scheme="own_scheme").global_quant_config.weight.group_size == 64
    finally:
        LLMTemplate.unregister_scheme("own_scheme")


def test_a_configuration_with_settings_assigned_quantizes_as_one_made_with_them(tmp_path: Path) -> None:
    made = LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
    assigned = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    assigned.global_quant_config.weight.group_size = 32
    models = [ModelQuantizer(config).quantize_model(tiny_model()) for config in (made, assigned)]
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    export_safetensors(models[1], tmp_path / "out")
    back = import_model_from_safetensors(None, tmp_path / "out").state_dict()
    assert all(torch.equal(first[name], back[name]) for name in first)


def test_settings_that_do_not_agree_are_refused_before_any_work() -> None:
    config = config_of("plain")
    config.global_quant_config.weight.ch_axis = None
    with pytest.raises(ConfigError, match="per_group needs ch_axis and group_size"):
        ModelQuantizer(config).quantize_model(tiny_model())


@pytest.mark.parametrize("algorithm", ["gptq", "gptaq", "qronos", "awq", "smooth", "autosmoothquant", "rotation"])
def test_a_configuration_read_from_json_runs_its_algorithm(algorithm: str) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm=algorithm)
    read = QConfig.from_dict(config.to_dict())
    models = [ModelQuantizer(c).quantize_model(tiny_model(), calibration_batches(2, 32)) for c in (config, read)]
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert models[0].quark_plan.config.algo_config == models[1].quark_plan.config.algo_config


def test_settings_of_another_class_under_an_algorithms_name_are_refused_with_text() -> None:
    for name, wanted in (("gptq", "GPTQConfig"), ("awq", "AWQConfig"), ("rotation", "RotationConfig")):
        config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
        config.algo_config = [AlgoConfig(name=name)]
        with pytest.raises(ConfigError, match=f"a AlgoConfig for '{name}', but this algorithm's settings must be a {wanted}"):
            ModelQuantizer(config).plan(tiny_model())


def test_settings_of_algorithms_keep_their_identity() -> None:
    derived = LLMTemplate.get("llama").algo_config["awq"]
    mine = type(derived)(scaling_layers=derived.scaling_layers, model_decoder_layers=derived.model_decoder_layers)
    template = LLMTemplate(model_type="acme", algorithm_configs={"awq": mine})
    assert template.algorithm_configs["awq"] is template.algo_config["awq"] is mine
    assert template.get_config(scheme="int4_wo_64", algorithm="awq").algo_config[0] is mine
    given = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm="awq", algo_configs={"awq": mine})
    assert given.algo_config[0] is mine
    own = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm="awq").algo_config[0]
    assert own == derived
    assert own is not derived, "what belongs to the family is no one's to change"


def test_with_llm_template_is_get_config() -> None:
    llama = LLMTemplate.get("llama")
    found = QConfig.with_llm_template(llama, "fp8", kv_cache_scheme="fp8", exclude_layers=["lm_head"])
    assert found == llama.get_config("fp8", kv_cache_scheme="fp8", exclude_layers=["lm_head"])
