"""Layers that runtimes fuse, and all experts of a block, are one group; a budget is one positive number."""

from __future__ import annotations

import pytest

from quark.config.architecture import Architecture
from quark.errors import ConfigError
from quark.models.plan.plan_row import PlanRow
from quark_workbench.mixed_precision import Budget, layer_groups

FACTS = Architecture(model_type="acme", decoder_blocks="layers", experts="mlp.experts", fused=(("q", "k", "v"), ("gate", "up")))


def rows(*names: str) -> list[PlanRow]:
    return [PlanRow(name, "linear", (4, 8), None, "") for name in names]


def groups(*names: str, architecture: Architecture | None = FACTS) -> dict[str, list[str]]:
    return {group.name: list(group.layers) for group in layer_groups(rows(*names), architecture)}


def test_projections_of_one_attention_are_a_group_and_those_of_another_block_another() -> None:
    found = groups("layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v", "layers.0.attn.o", "layers.1.attn.q", "layers.1.attn.v")
    assert found == {
        "layers.0.attn.q/k/v": ["layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v"],
        "layers.0.attn.o": ["layers.0.attn.o"],
        "layers.1.attn.q/v": ["layers.1.attn.q", "layers.1.attn.v"],
    }


def test_all_layers_of_all_experts_of_a_block_are_a_group() -> None:
    experts = [f"layers.0.mlp.experts.{i}.{layer}" for i in range(3) for layer in ("gate", "up", "down")]
    assert groups(*experts, "layers.0.mlp.shared.gate", "layers.0.mlp.shared.up") == {
        "layers.0.mlp.experts": experts,
        "layers.0.mlp.shared.gate/up": ["layers.0.mlp.shared.gate", "layers.0.mlp.shared.up"],
    }


def test_without_facts_every_layer_is_alone() -> None:
    assert groups("a.q", "a.k", architecture=None) == {"a.q": ["a.q"], "a.k": ["a.k"]}


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "mixtral"])
def test_every_fused_suffix_of_a_family_is_in_one_group(model_type: str) -> None:
    from quark.plugins import templates

    facts = templates().load_architecture(model_type)
    for suffixes in facts.fused:
        assert len(groups(*(f"model.layers.0.x.{suffix}" for suffix in suffixes), architecture=facts)) == 1


def test_weights_of_a_group_are_counted() -> None:
    (group,) = layer_groups(rows("a.q", "a.k"), FACTS)
    assert group.weights == 2 * 32


def test_there_is_one_budget() -> None:
    with pytest.raises(ConfigError, match="needs exactly one budget, and none is given"):
        Budget()
    with pytest.raises(ConfigError, match="needs exactly one budget, and bits and kl are given"):
        Budget(bits=5, kl=0.1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_positive(value: float) -> None:
    with pytest.raises(ConfigError, match=r"budget of kl=.* leaves nothing"):
        Budget(kl=value)
