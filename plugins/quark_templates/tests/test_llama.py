"""Families like Llama that have one matrix where others have two."""

from __future__ import annotations

from quark_algos.mappings.mapping import mappings_of

from .whole_models import blocks_of, facts_of, weights_of, whole_model


def test_granites_shared_expert_has_its_values_behind_its_gate_in_one_matrix() -> None:
    facts = facts_of("granitemoehybrid")
    (mapping,) = [m for m in mappings_of(facts) if m.kind == "mlp_value" and "experts" not in m.smooth_layer]
    block = blocks_of(whole_model("granitemoehybrid"), facts)[0]
    both, output = (weights_of(block.get_submodule(name)) for name in (mapping.smooth_layer, *mapping.balance_layers))
    assert both.shape[0] == 2 * output.shape[1]
    assert mapping.rows == "last"
