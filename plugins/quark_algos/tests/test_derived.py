"""Settings that algorithms derive from the facts of families.

For every template, and no less than AMD Quark 0.13 has by hand.

``documented_algorithms.json`` holds what AMD Quark 0.13 gives for each model type, with a star for the
numbers of experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import pytest

import quark
from quark.config.architecture import Architecture
from quark.config.templates.algorithms import refusal
from quark.errors import UnsupportedError
from quark.torch import LLMTemplate
from quark.torch.quantization.config.algo_configs import get_algo_config
from quark_algos.equalization.config import AWQConfig

DOCUMENTED: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "documented_algorithms.json").read_text("utf-8"))
ALGORITHMS = ["autosmoothquant", "awq", "gptaq", "gptq", "qronos", "rotation", "smoothquant"]
ROUNDINGS = ["gptaq", "gptq", "qronos"]
TEMPLATES = sorted(name for name in quark.templates().names() if quark.templates().source(name).distribution == "quark-templates")
NOT_TAKEN = {
    (
        "grok-1",
        "moe_block.experts.*.linear",
    ): "its output passes an activation on the way, so a scale would not; linear_v is what it multiplies",
    ("deepseek", "self_attn.q_a_proj"): "the first DeepSeek-MoE has plain projections; low-rank ones came with V2",
    ("deepseek", "self_attn.q_b_proj"): "likewise",
    ("deepseek", "self_attn.kv_a_proj_with_mqa"): "likewise",
    ("deepseek", "self_attn.kv_b_proj"): "likewise",
}
"""What is documented and does not hold: the name of a module that is scaled or solved, and the reason."""
FUSED = "values are rows of a fused matrix, of which documented pairs know nothing"
LOW_RANK = "documented pairs leave attention out, which the template excludes; it can be quantized all the same"
MIXTURE = "documented pairs leave out the norm before a mixture: router and all experts read it"
OTHERS = "documented pairs leave out the blocks without attention"
MORE = {
    ("chatglm", "self_attention.query_key_value"): FUSED,
    ("chatglm", "mlp.dense_h_to_4h"): "the half of a fused matrix that the gate multiplies",
    **{(v, n): LOW_RANK for v in ("deepseek_v2", "deepseek_v3") for n in ("input_layernorm", "self_attn.q_a_layernorm")},
    **{(v, n): LOW_RANK for v in ("deepseek_v2", "deepseek_v3") for n in ("self_attn.kv_a_layernorm", "self_attn.kv_b_proj")},
    **{(v, "post_attention_layernorm"): MIXTURE for v in ("deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoehybrid", "mixtral")},
    **{(v, "post_attention_layernorm"): MIXTURE for v in ("qwen2_moe", "qwen3_5_moe", "qwen3_moe")},
    ("granitemoehybrid", "input_layernorm"): OTHERS,
    ("granitemoehybrid", "block_sparse_moe.experts.*.up_proj"): "documented pairs leave experts out",
    ("granitemoehybrid", "shared_mlp.input_linear"): "the half of a fused matrix that the gate multiplies",
    ("grok-1", "pre_moe_norm"): "the documented pair scales the first expert alone, though router and all experts read the norm",
    ("grok-1", "moe_block.experts.*.linear_v"): "the documented pair takes the activated projection in its place",
    ("lfm2", "operator_norm"): OTHERS,
    ("mixtral", "mlp.experts.*.up_proj"): "documented pairs leave experts out",
    ("phi", "input_layernorm"): "documented pairs leave out the norm that attention and MLP share",
    ("qwen", "attn.c_attn"): FUSED,
    ("qwen2_moe", "mlp.shared_expert.up_proj"): "documented pairs leave the shared expert out",
    **{(v, "input_layernorm"): OTHERS + ", and attention with them" for v in ("qwen3_5", "qwen3_5_moe")},
    **{(v, "self_attn.v_proj"): "documented pairs leave attention out" for v in ("qwen3_5", "qwen3_5_moe")},
}
"""What is derived and not documented, by the operation that is scaled, and the reason."""


def documented(key: str) -> Iterator[tuple[str, str, Any, Any]]:
    """Model type, algorithm, its settings here, and the documented value of a key."""
    for model_type, entries in DOCUMENTED.items():
        for entry in (entry for entry in entries if key in entry):
            for algorithm in entry["algorithms"]:
                yield model_type, algorithm, get_algo_config(algorithm, model_type), entry[key]


def is_meant(documented_name: str, name: str) -> bool:
    """Documented names may be patterns, or only the end of a name."""
    return fnmatchcase(name, documented_name) or name.endswith(f".{documented_name}")


@pytest.mark.parametrize("model_type", TEMPLATES)
def test_every_family_takes_every_algorithm_or_says_why_not(model_type: str) -> None:
    template = LLMTemplate.get(model_type)
    for algorithm in ALGORITHMS:
        derived = get_algo_config(algorithm, model_type)
        assert derived == template.algo_config[algorithm]
        reason = refusal(algorithm, quark.templates().load_architecture(model_type))
        assert (derived is None) is (reason is not None)
        # Nothing in front of DeBERTa's fused projections can take a scale.
        assert derived is not None or algorithm == "rotation" or model_type == "deberta"
        if derived is not None:
            assert derived.model_decoder_layers == template.architecture.decoder_blocks  # type: ignore[attr-defined, union-attr]
            assert type(derived).from_dict(json.loads(json.dumps(derived.to_dict()))) == derived


def test_every_documented_pair_is_among_the_derived_ones() -> None:
    seen = 0
    for model_type, algorithm, config, pairs in documented("pairs"):
        for prev, layers in pairs:
            if (model_type, prev) in NOT_TAKEN:
                continue
            seen += 1
            found = [place for place in config.scaling_layers if is_meant(prev, place["prev_op"])]
            assert any(all(any(is_meant(wanted, name) for name in place["layers"]) for wanted in layers) for place in found), (
                f"{model_type}, {algorithm}: {prev} -> {layers}"
            )
    assert seen > 100


def test_what_is_derived_beyond_the_documented_pairs_is_listed_with_a_reason() -> None:
    beyond = set()
    for model_type, entries in DOCUMENTED.items():
        pairs = [pair for entry in entries for pair in entry.get("pairs", ())]
        config = get_algo_config("awq", model_type)
        assert isinstance(config, AWQConfig)
        for place in config.scaling_layers if pairs else ():
            known = [layers for prev, layers in pairs if is_meant(prev, place["prev_op"])]
            if all(len(layers) != len(place["layers"]) for layers in known):
                beyond.add((model_type, place["prev_op"]))
    assert beyond == set(MORE)


def test_every_documented_module_is_among_the_derived_ones() -> None:
    seen = 0
    for model_type, algorithm, config, modules in documented("modules"):
        for module in modules:
            if (model_type, module) in NOT_TAKEN:
                continue
            seen += 1
            assert any(is_meant(module, name) for name in config.inside_layer_modules), f"{model_type}, {algorithm}: {module}"
    assert seen > 100


@pytest.mark.parametrize("place", list(NOT_TAKEN), ids=" ".join)
def test_what_is_not_taken_is_documented_and_not_derived(place: tuple[str, str]) -> None:
    model_type, module = place
    assert f'"{module}"' in json.dumps(DOCUMENTED[model_type])
    awq, gptq = get_algo_config("awq", model_type), get_algo_config("gptq", model_type)
    assert isinstance(awq, AWQConfig)
    assert all(module != entry["prev_op"] for entry in awq.scaling_layers)
    assert module.startswith("moe_block") or module not in gptq.inside_layer_modules  # type: ignore[union-attr]


@pytest.mark.parametrize("key", ["alpha", "scale_clamp_min", "compute_scale_loss", "block_size", "damp_percent", "desc_act", "beta"])
def test_documented_values_are_derived(key: str) -> None:
    compared = [(model_type, algorithm, getattr(config, key), value) for model_type, algorithm, config, value in documented(key)]
    assert compared
    assert [entry for entry in compared if entry[2] != entry[3]] == []


def test_decoder_blocks_are_where_they_are_documented() -> None:
    assert [c for c in documented("blocks") if c[2].model_decoder_layers != c[3]] == []


def test_the_documented_rotation_of_llama_is_derived() -> None:
    """The order of layers that read the same norm means nothing."""

    def sorted_lists(parts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        return {
            part: [{k: sorted(v) if isinstance(v, list) else v for k, v in e.items()} for e in entries] for part, entries in parts.items()
        }

    ((_, _, config, parts),) = documented("scaling_layers")
    assert sorted_lists(config.scaling_layers) == sorted_lists(parts)
    assert (config.backbone, config.v_proj, config.o_proj) == ("model", "self_attn.v_proj", "self_attn.o_proj")
    assert (config.self_attn, config.mlp) == ("self_attn", "mlp")


def test_a_family_without_known_projections_is_refused_with_the_reason() -> None:
    bare = Architecture(model_type="bare", decoder_blocks="model.layers")
    template, transforms = LLMTemplate.from_architecture(bare), [name for name in ALGORITHMS if name not in ROUNDINGS]
    assert [template.algo_config[name] for name in transforms] == [None] * len(transforms)
    assert all(refusal(name, bare) for name in transforms)
    without_blocks = Architecture(model_type="bare")
    assert all(LLMTemplate.from_architecture(without_blocks).algo_config[name] is None for name in ALGORITHMS)
    assert {refusal(name, without_blocks) for name in ROUNDINGS} == {"its template names no decoder blocks"}


@pytest.mark.parametrize("experts", [None, "mlp.experts"])
def test_a_rounding_takes_all_layers_of_blocks_whose_projections_are_not_known(experts: str | None) -> None:
    template = LLMTemplate.from_architecture(Architecture(model_type="bare", decoder_blocks="model.layers", experts=experts))
    assert [template.algo_config[name].inside_layer_modules for name in ROUNDINGS] == [[]] * len(ROUNDINGS)


def test_a_reason_in_the_facts_goes_before_what_could_be_derived() -> None:
    facts = attrs.evolve(quark.templates().load_architecture("llama"), unsupported={"awq": "for a test"})
    template = LLMTemplate.from_architecture(facts)
    assert template.algo_config["awq"] is None
    assert template.algo_config["gptq"] is not None
    assert refusal("awq", facts) == "for a test"


def test_the_error_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.config.templates.template.require_processor", lambda name: None)
    with pytest.raises(
        UnsupportedError, match=r"rotation.*'gemma4'.*post_attention_layernorm and post_feedforward_layernorm.*algo_configs"
    ):
        LLMTemplate.get("gemma4").get_config("fp8", algorithm="rotation")
    config = LLMTemplate.get("llama").get_config("fp8", algorithm=["rotation", "smoothquant", "gptq"])
    assert [c.name for c in config.algo_config or ()] == ["rotation", "smooth", "gptq"]


def test_experts_are_scaled_one_by_one_and_their_norm_together() -> None:
    config = get_algo_config("awq", "mixtral")
    assert isinstance(config, AWQConfig)
    assert config.scaling_layers[2:] == [
        {
            "prev_op": "post_attention_layernorm",
            "layers": ["mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.gate"],
            "inp": "mlp.experts.*.gate_proj",
            "module2inspect": "mlp",
        },
        {
            "prev_op": "mlp.experts.*.up_proj",
            "layers": ["mlp.experts.*.down_proj"],
            "inp": "mlp.experts.*.down_proj",
            "module2inspect": None,
        },
    ]


def test_side_by_side_attention_and_mlp_share_one_place() -> None:
    config = get_algo_config("smoothquant", "gptj")
    first = config.scaling_layers[0]  # type: ignore[union-attr]
    assert first == {
        "prev_op": "ln_1",
        "layers": ["attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in"],
        "inp": "attn.q_proj",
        "module2inspect": "",
    }
