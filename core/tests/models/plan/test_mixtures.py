"""`quark.models.plan.mixtures`: layers of experts, and where experts are separated."""

from __future__ import annotations

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from quark.config.architecture import Architecture
from quark.config.model import QConfig
from quark.models.plan.mixtures import ExpertNames, fused_mixtures, separate_experts
from quark.plugins import schemes

MIXTURE = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("architecture", "holder"),
    [
        (Architecture(model_type="acme", experts="moe.specialists"), "moe.specialists"),
        (Architecture(model_type="acme", experts="experts"), "experts"),
        (None, "experts"),
    ],
)
def test_layers_of_experts_are_found_by_the_module_that_holds_them(architecture: Architecture | None, holder: str) -> None:
    names = ExpertNames(architecture)
    layer = f"layers.0.{holder}.12.up_proj"
    assert names.expert(layer) == f"layers.0.{holder}.12"
    assert names.projection(layer) == f"layers.0.{holder}.*.up_proj"
    others = [f"layers.0.{holder}_3.up_proj", f"layers.0.{holder}.gate.up_proj", f"layers.0.x{holder}.3.up_proj", "layers.0.up_proj"]
    assert names.among([layer, *others]) == [layer]
    assert [names.expert(name) for name in others] == others
    assert [names.projection(name) for name in others] == [None] * 4


def test_a_family_without_experts_has_no_layers_of_experts() -> None:
    assert ExpertNames(Architecture(model_type="acme")).among(["layers.0.mlp.experts.1.up_proj"]) == []


@pytest.mark.parametrize(
    ("excluded", "kept", "separated"),
    [
        (["*"], (), []),
        ([], (), [MIXTURE]),
        (["*", f"{MIXTURE}.2.down_proj"], (), [MIXTURE]),
        (["*"], (f"{MIXTURE}.0.up_proj",), [MIXTURE]),
    ],
    ids=["nothing is quantized", "all is", "one expert is named", "one expert stays as it comes"],
)
def test_experts_are_taken_apart_where_one_of_them_is_told_from_the_others(
    excluded: list[str], kept: tuple[str, ...], separated: list[str]
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    assert list(fused_mixtures(model)) == [MIXTURE]
    config = QConfig(schemes().load_config("int4_wo_32")(), exclude=excluded)
    assert separate_experts(model, config, kept) == separated
    assert list(fused_mixtures(model)) == [name for name in [MIXTURE] if name not in separated]
