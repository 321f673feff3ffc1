"""If a pattern uses a checkpoint's names of layers, the template adds a pattern with the modules' names."""

from __future__ import annotations

import torch
from torch import nn

from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.templates import LLMTemplate
from quark.models.plan.quant_plan import make_plan

FACTS = Architecture(
    model_type="acme_stored",
    kv_layers_name="*wkv",
    exclude_layers_name=("head", "mtp.*"),
    module_patterns=(("*wkv", "*kv_proj"), ("head", "lm_head")),
)


def test_a_pattern_is_followed_by_those_for_the_same_layers() -> None:
    assert FACTS.with_modules(["other", "head", "*wkv"]) == ["other", "head", "lm_head", "*wkv", "*kv_proj"]


def test_a_template_shows_what_is_documented_and_its_configurations_have_both() -> None:
    template = LLMTemplate.from_architecture(FACTS)
    assert (template.kv_layers_name, template.exclude_layers_name) == (["*wkv"], ["head", "mtp.*"])
    config = template.get_config("fp8", kv_cache_scheme="fp8")
    assert config.exclude == ["head", "lm_head", "mtp.*"]
    assert config.kv_cache_group == list(config.kv_cache_quant_config) == ["*wkv", "*kv_proj"]
    assert template.get_config("fp8", exclude_layers=["head", "x"]).exclude == ["head", "lm_head", "x"]


def test_a_plan_takes_it_that_patterns_of_the_other_names_match_nothing() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(4, 4), "kv_proj": nn.Linear(4, 4)}).to(torch.float32)
    plan = make_plan(model, QConfig(global_quant_config=QLayerConfig(), exclude=["head", "lm_head", "mtp.*"]), FACTS)
    assert {row.name: row.reason for row in plan.rows}["lm_head"] == "excluded: lm_head"
