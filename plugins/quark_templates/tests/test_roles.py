"""Facts on queries, keys, values and norms of keys, of every family.

Compared with what names show on a tiny model of it.
"""

from __future__ import annotations

from functools import cache

import attrs
import pytest
from torch import nn

from quark.models.layers import counts_as
from quark.models.plan.inferred_architecture import with_inferred_attention

from .caches import LATENT
from .whole_models import ALL, facts_of, whole_model

OPTIONAL_NORMS = {"cohere", "glm4_moe", "internvl", "phi", "stablelm"}
"""Their norms of keys are there in some configurations, and not in the tiny model's."""


@cache
def named_and_inferred(model_type: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return the names in the facts, and the names that patterns infer, by fact.

    Names in a block, of attention itself and not of an indexer or an expert in it.
    """

    facts, model = facts_of(model_type), whole_model(model_type)
    roles = ("query_projections", "key_projections", "value_projections", "key_norms")
    inside = f"{facts.decoder_blocks}."
    layers = [name for name, m in model.named_modules() if counts_as(m) is nn.Linear and name.startswith(inside)]
    inferred = with_inferred_attention(attrs.evolve(facts, **dict.fromkeys(roles)), model, layers)
    attentions = {name.rpartition(".")[0] for name in (*facts.attention_inputs, *facts.mixer)}
    attentions = {name for name in attentions if not name.endswith(".indexer")}
    shown = {role: {n for n in getattr(inferred, role) if n.rpartition(".")[0] in attentions} for role in roles}
    return {role: set(getattr(facts, role)) for role in roles}, shown


@pytest.mark.parametrize("model_type", ALL)
def test_query_key_and_value_projections(model_type: str) -> None:
    named, shown = named_and_inferred(model_type)
    if model_type in LATENT:
        mixer = set(facts_of(model_type).mixer)  # linear attention, whose projections have the same names
        shown = {role: names - mixer for role, names in shown.items()}
        assert named["query_projections"] == {"self_attn.q_b_proj"} < shown["query_projections"]
        shown = shown | {"query_projections": named["query_projections"]}
    for role in ("query_projections", "key_projections", "value_projections"):
        assert named[role] == shown[role], role


@pytest.mark.parametrize("model_type", ALL)
def test_key_norms(model_type: str) -> None:
    named, shown = named_and_inferred(model_type)
    if model_type in OPTIONAL_NORMS:
        assert shown["key_norms"] == set() < named["key_norms"]
    else:
        assert named["key_norms"] == shown["key_norms"]
