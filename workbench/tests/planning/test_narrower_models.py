"""`quark_workbench.planning.narrower_models`: what is halved of a model's config."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from quark_workbench.planning.narrower_models import narrowed


def test_a_narrowed_config_has_half_of_the_channels_heads_and_experts_until_they_are_few() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{"hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8},
        **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 48},
    )
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts", "num_attention_heads", "num_key_value_heads")
    half = narrowed(config, 1)
    assert [getattr(half, name) for name in names] == [1024, 2816, 384, 32, 16, 1]
    assert (half.head_dim, half.num_experts_per_tok, half.num_hidden_layers) == (128, 8, 1)
    quarter = narrowed(half, 1)
    assert [getattr(quarter, name) for name in names] == [512, 1408, 128, 16, 8, 1]
    assert narrowed(quarter, 1) is None
    assert (config.hidden_size, config.num_experts, config.num_hidden_layers) == (2048, 64, 48)


@pytest.mark.parametrize("heads", [9, 1])
def test_a_config_whose_heads_cannot_be_halved_is_not_narrowed(heads: int) -> None:
    assert narrowed(AutoConfig.for_model("llama", hidden_size=1152, num_attention_heads=heads), 1) is None
