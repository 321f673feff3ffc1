"""User mappings of SmoothQuant and AWQ.

All forms of AMD Quark's documentation are read, and entries that match nothing are reported.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import quark
import quark_tiny_model as tiny
from quark.errors import ConfigError
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos.equalization.config import AWQConfig, SmoothQuantConfig
from quark_algos.mappings.mapping import mappings_of
from quark_algos.mappings.resolve import resolve
from quark_algos.mappings.user_mappings import user_mappings_of

from ..rotation.models import IDS, facts_of, model_of

DATA = tiny.calibration_batches(2, 64)
SHAPES = "module.self_attn.v_proj.weight.shape == module.self_attn.o_proj.weight.shape"
QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
DOCUMENTED: list[dict[str, Any]] = [
    {
        "prev_op": "input_layernorm",
        "layers": QKV,
        "inp": QKV[0],
        "module2inspect": "self_attn",
        "has_kwargs": True,
        "help": "attention input",
    },
    {
        "prev_op": "self_attn.v_proj",
        "layers": ["self_attn.o_proj"],
        "inp": "self_attn.o_proj",
        "module2inspect": None,
        "has_kwargs": False,
        "condition": SHAPES,
    },
    {
        "prev_op": "post_attention_layernorm",
        "layers": ["mlp.gate_proj", "mlp.up_proj"],
        "inp": "mlp.gate_proj",
        "module2inspect": "mlp",
        "has_kwargs": False,
    },
    {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj", "module2inspect": None, "has_kwargs": False},
]
"""Entries with all the keys of AMD Quark's older documentation."""


def smoothed(model: nn.Module, entries: list[dict[str, Any]], data: Any = DATA, model_type: str = "llama") -> dict[str, Any]:
    """Return the metrics of the scaled mappings of the first block, by smooth layer."""
    config = LLMTemplate.get(model_type).get_config("int8")
    config.algo_config = [SmoothQuantConfig(alpha=0.4, preset="reference", scaling_layers=entries)]
    metrics = ModelQuantizer(config).quantize_model(model, data).quark_report.transformed
    prefix = "model.layers.0."
    return {name.removeprefix(prefix): f for name, f in metrics.items() if name.startswith(prefix) and "scale_max" in f}


def test_the_documented_entries_are_the_mappings_of_the_architecture() -> None:
    known = mappings_of(quark.templates().load_architecture("llama"))
    entries = user_mappings_of(DOCUMENTED, known)
    names = [(e.mapping.kind, e.mapping.smooth_layer, e.mapping.balance_layers) for e in entries]
    assert names == [(m.kind, m.smooth_layer, m.balance_layers) for m in known]
    assert [e.condition is not None for e in entries] == [False, True, False, False]


@pytest.mark.parametrize(("kv_heads", "is_scaled"), [(4, True), (2, False)])
def test_the_documented_condition_leaves_shared_values_alone(kv_heads: int, is_scaled: bool) -> None:
    model = model_of("llama", torch.float32, num_key_value_heads=kv_heads)
    scaled = set(smoothed(model, DOCUMENTED, [IDS]))
    assert scaled == {"input_layernorm", "post_attention_layernorm", "mlp.up_proj"} | ({"self_attn.v_proj"} if is_scaled else set())


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_ends_of_names_mean_the_projections_of_every_expert(model_type: str) -> None:
    facts = facts_of(model_type)
    (entry,) = user_mappings_of([{"prev_op": "up_proj", "layers": ["down_proj"], "inp": "down_proj"}], mappings_of(facts))
    block = model_of(model_type).get_submodule(f"{facts.decoder_blocks}.0")
    mappings = entry.mappings_in(block)
    assert [m.smooth_layer for m in mappings] == [f"{facts.experts}.{i}.up_proj" for i in range(3)]
    for mapping in mappings:
        resolved = resolve(mapping, block, facts, 4)
        assert not isinstance(resolved, str)
        assert list(resolved[0].balance_layers) == [mapping.smooth_layer.replace("up_proj", "down_proj")]


def test_ends_of_names_are_scaled_in_whole_runs() -> None:
    model = model_of("qwen3_moe", torch.float32)
    scaled = smoothed(model, [{"prev_op": "up_proj", "layers": ["down_proj"], "inp": "down_proj"}], [IDS], "qwen3_moe")
    assert set(scaled) == {f"mlp.experts.{i}.up_proj" for i in range(3)}


def test_a_single_layer_may_be_written_without_a_list() -> None:
    assert set(smoothed(tiny.tiny_model(), [{"prev_op": "mlp.up_proj", "layers": "mlp.down_proj"}])) == {"mlp.up_proj"}


def test_a_mapping_that_is_nowhere_is_reported_with_the_closest_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="quark"):
        scaled = smoothed(tiny.tiny_model(), [*DOCUMENTED[2:], {"prev_op": "mlp.up_porj", "layers": ["mlp.down_proj"]}])
    assert set(scaled) == {"post_attention_layernorm", "mlp.up_proj"}
    (message,) = [r.message for r in caplog.records if "does not exist" in r.message]
    assert "'mlp.up_porj' -> mlp.down_proj" in message
    assert "did you mean 'mlp.up_proj'?" in message


def test_a_mapping_whose_shapes_do_not_fit_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="quark"):
        smoothed(tiny.tiny_model(), [*DOCUMENTED[2:], {"prev_op": "mlp.up_proj", "layers": ["self_attn.q_proj"]}])
    (message,) = [r.message for r in caplog.records if "does not exist" in r.message]
    assert "384 outputs of this layer do not match the 256" in message


def test_names_of_another_family_are_refused() -> None:
    config = LLMTemplate.get("llama").get_config("int8")
    config.algo_config = [AWQConfig(scaling_layers=[{"prev_op": "ln_1", "layers": ["attn.c_attn"]}, {"prev_op": "fc1", "layers": ["fc2"]}])]
    with pytest.raises(ConfigError, match=r"'ln_1' -> attn\.c_attn does not exist in this model: .*, and no other entry"):
        ModelQuantizer(config).quantize_model(tiny.tiny_model(), DATA)


def test_a_mapping_that_lacks_a_balance_layer_is_skipped_although_the_same_norm_has_a_sound_one(caplog: pytest.LogCaptureFixture) -> None:
    """A scale on a norm changes the block's output if one layer that reads the norm is not multiplied."""
    part = {"prev_op": "post_attention_layernorm", "layers": ["mlp.up_proj"]}
    with caplog.at_level(logging.WARNING, logger="quark"):
        scaled = smoothed(tiny.tiny_model(), [DOCUMENTED[2], part])
    assert set(scaled) == {"post_attention_layernorm"}
    assert any("changes the block's output" in r.message for r in caplog.records)


def test_mappings_that_do_not_apply_are_in_the_plan_with_the_reason() -> None:
    entries = [
        {"prev_op": "input_layernorm", "layers": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]},
        {
            "prev_op": "self_attn.v_proj",
            "layers": ["self_attn.o_proj"],
            "condition": "module.self_attn.v_proj.weight.shape == module.mlp.up_proj.weight.shape",
        },
    ]
    config = LLMTemplate.get("llama").get_config("int4_wo_32")
    config.algo_config = [AWQConfig(scaling_layers=entries)]
    notes = ModelQuantizer(config).plan(tiny.tiny_model()).notes
    expected = "no scale is moved from 'self_attn.v_proj' to self_attn.o_proj in every block: its condition does not hold"
    assert [note for note in notes if "no scale is moved" in note] == [expected]


@pytest.mark.parametrize("norm", ["input_layernorm", "before_attention"])
def test_a_mapping_that_the_family_does_not_have_is_resolved_by_its_module(norm: str) -> None:
    """A vector is a norm's weight, a matrix a projection's, whatever they are called."""
    block = model_of("llama").get_submodule("model.layers.0")
    block.add_module(norm, block.get_submodule("input_layernorm"))
    entries = [{"prev_op": norm, "layers": QKV}, {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"]}]
    kinds = []
    for entry in user_mappings_of(entries, ()):
        resolved = resolve(entry.mapping, block, facts_of("gemma"), 4)
        assert not isinstance(resolved, str)
        kinds.append((resolved[0].unit_offset, resolved[0].smooth_layer is block.get_submodule(entry.mapping.smooth_layer)))
    assert kinds == [(True, True), (False, True)], "only norms of Gemma have a unit offset"
