"""User streams.

Read in AMD Quark's form, folded without a change of the function, and rejected before any work if not closed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from quark.config.architecture import Architecture
from quark.errors import ConfigError, UnsupportedError
from quark.models.plan.inferred_architecture import infer_architecture
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.fold import fold_r1, r1_of, untie
from quark_algos.rotation.norm_form import form_of, with_form_of
from quark_algos.rotation.residual_stream import in_block, outside_blocks
from quark_algos.rotation.user_stream import PARTS, UserStream, entries_of, user_stream

from .models import WIDTH, blocks_of, distance, facts_of, logits, model_of

TOLERANCE = 1e-9

Entries = dict[str, list[dict[str, Any]]]


def documented(attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")) -> Entries:
    """Return ``scaling_layers`` of Llama as in AMD Quark's documentation, with its order of names."""
    here = "model.layers.layer_id"
    read = [f"{here}.self_attn.{name}" for name in attention]
    inside = {
        "prev_modules": [f"{here}.self_attn.o_proj"],
        "norm_module": f"{here}.post_attention_layernorm",
        "next_modules": [f"{here}.mlp.up_proj", f"{here}.mlp.gate_proj"],
    }
    norm = f"{here}.input_layernorm"
    return {
        "first_layer": [{"prev_modules": ["model.embed_tokens"], "norm_module": norm, "next_modules": read}, inside],
        "middle_layers": [{"prev_modules": ["model.layers.pre_layer_id.mlp.down_proj"], "norm_module": norm, "next_modules": read}, inside],
        "last_layer": [{"prev_modules": [f"{here}.mlp.down_proj"], "norm_module": "model.norm", "next_modules": ["lm_head"]}],
    }


def changed(old: str, new: str) -> Entries:
    """Return `documented` with a name replaced, or removed if ``new`` is empty."""
    assert f'"{old}"' in json.dumps(documented())
    text = json.dumps(documented())
    return json.loads(text.replace(f', "{old}"', "").replace(f'"{old}", ', "") if not new else text.replace(f'"{old}"', f'"{new}"'))  # type: ignore[no-any-return]


def read(entries: Any, model_type: str = "llama", facts: Architecture | None = None, **sizes: Any) -> UserStream | None:
    return user_stream(RotationConfig(scaling_layers=entries), model_of(model_type, **sizes), facts or facts_of(model_type), WIDTH)


def rotate(model: nn.Module, facts: Architecture, entries: Entries, seed: int | None = 3) -> None:
    stream = user_stream(RotationConfig(scaling_layers=entries), model, facts, WIDTH)
    assert stream is not None
    rotation = r1_of(WIDTH, stream.facts, None, seed)
    for block, names in stream.names.items():
        fold_r1(names.resolve(model.get_submodule(block)), stream.facts, rotation)
    untie(model)


def derived(model_type: str) -> Entries:
    config = RotationConfig.for_architecture(facts_of(model_type))
    assert config is not None
    assert isinstance(config.scaling_layers, dict)
    return config.scaling_layers


def unknown(model: nn.Module) -> Architecture:
    """Return the architecture that is inferred for a model without a template."""
    found = infer_architecture(model, "plain")
    assert found is not None
    return found


def test_entries_of_the_architecture_and_empty_entries_are_no_user_stream() -> None:
    for entries in (derived("llama"), {}, [], {part: [] for part in PARTS}):
        assert read(entries) is None


def test_the_documented_form_says_what_the_facts_say() -> None:
    model, facts = model_of("llama", num_hidden_layers=3), facts_of("llama")
    stream = user_stream(RotationConfig(scaling_layers=documented()), model, facts, WIDTH)
    assert stream is not None
    assert list(stream.names) == ["", "model.layers.0", "model.layers.1", "model.layers.2"]
    for block, names in stream.names.items():
        module = model.get_submodule(block)
        one, other = names.resolve(module), in_block(module, facts) if block else outside_blocks(model, facts)
        assert set(one.writers.values()) == set(other.writers.values())
        assert [r.norm for r in one.readings] == [r.norm for r in other.readings]
        assert [set(r.readers.values()) for r in one.readings] == [set(r.readers.values()) for r in other.readings]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_model_rotated_by_a_user_stream_computes_what_it_did(blocks: int, is_known: bool) -> None:
    model = model_of("llama", num_hidden_layers=blocks)
    facts = facts_of("llama") if is_known else unknown(model)
    before, weight = logits(model), model.get_submodule("lm_head").get_parameter("weight")
    rotate(model, facts, documented())
    assert distance(model.get_submodule("lm_head").get_parameter("weight"), weight) > 0.1
    assert distance(logits(model), before) < TOLERANCE


@pytest.mark.parametrize("model_type", ["gemma", "gpt_neox", "llama", "opt", "phi", "qwen3_moe"])
def test_a_family_that_nothing_is_known_of_is_rotated_as_written(model_type: str) -> None:
    """The form of the norms, with a unit offset or with mean subtraction, is measured."""
    model, known = model_of(model_type), facts_of(model_type)
    facts, before = unknown(model), logits(model)
    assert RotationConfig.refusal(facts) is not None
    output = blocks_of(model, known)[0].get_submodule(known.attention_output or "")
    weight = output.get_parameter("weight")
    rotate(model, facts, derived(model_type))
    assert distance(output.get_parameter("weight"), weight) > 0.1
    assert distance(logits(model), before) < TOLERANCE


def test_a_variant_whose_norm_is_another_is_rotated_by_a_user_stream() -> None:
    """The architecture has a separate norm before the MLP, which this variant lacks."""
    model, facts = model_of("stablelm", use_parallel_residual=True), facts_of("stablelm")
    with pytest.raises(UnsupportedError):
        in_block(blocks_of(model, facts)[0], facts)
    before = logits(model)
    here, entries = "model.layers.layer_id", documented()
    for part in ("first_layer", "middle_layers"):
        entries[part][0]["next_modules"] += [f"{here}.mlp.gate_proj", f"{here}.mlp.up_proj"]
        entries[part][0]["prev_modules"] += [f"{here}.self_attn.o_proj", f"{here}.mlp.down_proj"]
        del entries[part][1]
    rotate(model, facts, entries)
    assert distance(logits(model), before) < TOLERANCE


def test_stars_stand_for_experts() -> None:
    model, facts = model_of("mixtral"), facts_of("mixtral")
    before, entries = logits(model), copy.deepcopy(derived("mixtral"))
    assert any("*" in name for entry in entries["first_layer"] for name in entry["next_modules"])
    for part in entries.values():
        for entry in part:
            entry["prev_modules"].reverse()
            entry["next_modules"].reverse()
    rotate(model, facts, entries)
    assert distance(logits(model), before) < TOLERANCE


HERE = "model.layers.layer_id"
LEFT_OUT = [
    (f"{HERE}.self_attn.v_proj", r"model\.layers\.\{0-1\}\.self_attn\.v_proj\. These layers"),
    (f"{HERE}.mlp.up_proj", r"lack model\.layers\.\{0-1\}\.mlp\.up_proj"),
]


@pytest.mark.parametrize(("name", "words"), LEFT_OUT)
def test_a_reader_that_is_left_out_is_named_before_anything_changes(name: str, words: str) -> None:
    model, facts = model_of("llama"), facts_of("llama")
    kept = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=words):
        rotate(model, facts, changed(name, ""))
    assert all(p is kept[n] for n, p in model.named_parameters())


def without_last() -> Entries:
    return documented() | {"last_layer": []}


def with_entry(**changes: Any) -> Entries:
    entries: Entries = json.loads(json.dumps(documented()))
    entries["middle_layers"][1] |= changes
    return entries


def test_a_writer_that_is_left_out_is_named() -> None:
    entries = documented()
    entries["last_layer"][0]["prev_modules"] = []
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1\.mlp\.down_proj"):
        read(entries)
    with pytest.raises(ConfigError, match="no layer writes to the residual stream outside the blocks"):
        read(changed("model.embed_tokens", "model.layers.0.self_attn.o_proj"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: changed(f"{HERE}.self_attn.q_proj", f"{HERE}.self_attn.q_porj"),
            rf"first_layer\[0\].*q_porj'; the closest name is '{HERE}.*q_proj'",
        ),
        (lambda: changed(f"{HERE}.input_layernorm", f"{HERE}.ln_1"), r"no block of this model has 'model\.layers\.layer_id\.ln_1'"),
        (lambda: changed("lm_head", "lm_heda"), "the closest name is 'lm_head'"),
        (without_last, "no layer reads the residual stream outside the blocks"),
        (lambda: with_entry(norm_module=f"{HERE}.input_layernorm"), r"reads the residual stream through 'post_attention_layernorm', not"),
        (lambda: with_entry(norm_module="model.norm"), "are not in the same block"),
        (
            lambda: with_entry(prev_modules=[f"{HERE}.self_attn.o_proj", f"{HERE}.self_attn.q_proj"]),
            "q_proj' of 'prev_modules' does not write",
        ),
        (
            lambda: with_entry(next_modules=[f"{HERE}.mlp.up_proj", f"{HERE}.mlp.gate_proj", f"{HERE}.self_attn.o_proj"]),
            "o_proj' of 'next_modules'",
        ),
        (lambda: with_entry(prev_modules=[f"{HERE}.mlp"]), r"1\.mlp' \(LlamaMLP\) has no single weight matrix"),
        (lambda: with_entry(next_modules=[f"{HERE}.mlp.down_proj"]), r"has 64 inputs, but the residual stream has 32 channels"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_with_a_reason(make: Callable[[], Entries], words: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=words):
        read(make())


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            [{"prev_op": "input_layernorm", "layers": ["self_attn.q_proj"]}],
            "a list for first_layer, middle_layers, last_layer, but this is a list",
        ),
        ({"first_layer": [{}], "middle_layers": []}, "but this has first_layer, middle_layers"),
        ({"first_layer": [{}], "middle_layers": [], "last_layer": []}, r"first_layer\[0\]: an entry must be a dict with prev_modules"),
        (with_entry(norm_modul="x"), r"middle_layers\[1\]: an entry has no key 'norm_modul'; did you mean 'norm_module'"),
        (with_entry(prev_modules="model.embed_tokens"), "'prev_modules' must be a list of full names"),
        (with_entry(norm_module=["a", "b"]), "'norm_module' must be one full name"),
    ],
)
def test_another_form_is_refused_by_the_entry_and_the_key(entries: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        entries_of(entries)


def test_what_only_rotations_that_run_with_the_model_need_is_passed_over() -> None:
    assert entries_of(with_entry(target_modules=[f"{HERE}.mlp.up_proj"])) == entries_of(documented())


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2", "bloom"])
def test_families_that_cannot_be_rotated_cannot_be_by_a_user_stream(model_type: str) -> None:
    with pytest.raises(UnsupportedError, match=r"scales? single channels"):
        read(documented(), facts=facts_of(model_type))


def test_names_that_only_other_models_of_a_family_have_may_stay() -> None:
    model, llama = model_of("llama"), facts_of("llama")
    facts = attrs.evolve(llama, mlp_inputs=(*llama.mlp_inputs, "mlp.third_proj"))
    config = RotationConfig.for_architecture(facts)
    assert config is not None
    before, entries = logits(model), json.loads(json.dumps(config.scaling_layers))
    entries["middle_layers"][0]["next_modules"].reverse()
    with pytest.raises(ConfigError, match="third_proj"):
        read(entries)
    rotate(model, facts, entries)
    assert distance(logits(model), before) < TOLERANCE


class Offset(nn.Module):
    """An RMSNorm with an offset added to its weight, and its root mean square raised to a power."""

    def __init__(self, offset: float = 0.0, power: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.offset, self.power = offset, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt() ** self.power * (self.weight + self.offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_told_apart_by_what_they_compute(dtype: torch.dtype) -> None:
    layer = nn.LayerNorm(WIDTH)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    forms = [
        form_of(norm.to(dtype), WIDTH)
        for norm in (layer, nn.LayerNorm(WIDTH, elementwise_affine=False), nn.RMSNorm(WIDTH), Offset(), Offset(1.0))
    ]
    assert forms == [(True, False), (True, False), (False, False), (False, False), (False, True)]
    assert [form_of(norm.to(dtype), WIDTH) for norm in (Offset(0.5), Offset(power=0.9), nn.Linear(WIDTH, WIDTH), nn.Identity())] == [
        None
    ] * 4


def test_norms_of_unknown_or_different_forms_are_refused_by_name() -> None:
    facts = attrs.evolve(facts_of("llama"), final_norm=None)
    with pytest.raises(UnsupportedError, match=r"'norm' \(Identity\) is neither"):
        with_form_of(facts, [("norm", nn.Identity())], WIDTH)
    with pytest.raises(UnsupportedError, match="one and two are norms of different forms"):
        with_form_of(facts, [("one", Offset()), ("two", Offset(1.0))], WIDTH)
    assert with_form_of(facts, [("one", Offset(1.0))], WIDTH) == attrs.evolve(facts, norm_has_unit_offset=True)
