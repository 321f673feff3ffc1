"""Configuration classes of the algorithms.

Defaults, keywords of every generation, JSON, and what is refused.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from quark.config.algorithm import AlgoConfig
from quark.torch.quantization import load_quant_algo_config_from_file
from quark_algos.equalization.config import AutoSmoothQuantConfig, AWQConfig, SmoothQuantConfig
from quark_algos.gptq.config import GPTAQConfig, GPTQConfig, QronosConfig
from quark_algos.rotation.config import OnlineRotationConfig, QuaRotConfig, RotationConfig

SCALING = [{"prev_op": "input_layernorm", "layers": ["self_attn.q_proj"], "inp": "self_attn.q_proj", "module2inspect": "self_attn"}]
EXAMPLES: list[AlgoConfig] = [
    AWQConfig(scaling_layers=SCALING, model_decoder_layers="model.layers"),
    SmoothQuantConfig(alpha=0.5, scaling_layers=SCALING),
    AutoSmoothQuantConfig(compute_scale_loss="MAE"),
    GPTQConfig(inside_layer_modules=["fc1"], model_decoder_layers="model.layers"),
    GPTAQConfig(alpha=0.5),
    QronosConfig(inside_layer_modules=["fc1"], model_decoder_layers="model.layers"),
    RotationConfig(scaling_layers={"first_layer": []}, r4=True),
]


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda c: c.name)
def test_a_configuration_is_read_back_from_json_as_it_was(config: AlgoConfig, tmp_path: Path) -> None:
    path = tmp_path / "algorithm.json"
    path.write_text(json.dumps(config.to_dict()), encoding="utf-8")
    assert load_quant_algo_config_from_file(path) == config


def test_what_gptq_does_not_read_makes_no_difference_between_configurations() -> None:
    assert GPTQConfig(embedding_layers=["model.embed_tokens"], true_sequential=False) == GPTQConfig()


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda c: c.name)
def test_both_ways_of_changing_a_field_agree(config: Any) -> None:
    changed = {"model_decoder_layers": "net"}
    assert dataclasses.replace(config, **changed) == attrs.evolve(config, **changed) != config


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (SmoothQuantConfig, {"name": "smooth", "alpha": 1, "scale_clamp_min": 1e-3, "scaling_layers": [], "model_decoder_layers": ""}),
        (AWQConfig, {"name": "awq", "scaling_layers": [], "model_decoder_layers": ""}),
        (
            GPTQConfig,
            {
                "name": "gptq",
                "block_size": 128,
                "damp_percent": 0.01,
                "desc_act": True,
                "static_groups": True,
                "inside_layer_modules": [],
                "model_decoder_layers": "",
            },
        ),
        (
            AutoSmoothQuantConfig,
            {"name": "autosmoothquant", "scaling_layers": None, "model_decoder_layers": None, "compute_scale_loss": "MSE"},
        ),
    ],
)
def test_defaults_are_the_documented_ones(make: Any, expected: dict[str, Any]) -> None:
    assert make().to_dict() == expected


def test_defaults_that_need_arguments_are_the_documented_ones() -> None:
    qronos = QronosConfig(inside_layer_modules=[], model_decoder_layers="")
    assert (qronos.block_size, qronos.desc_act, qronos.static_groups, qronos.alpha, qronos.beta) == (128, True, True, 1e-3, 1e4)
    assert GPTAQConfig().alpha == 0.25
    rotation = RotationConfig(scaling_layers=[])
    assert (rotation.r1, rotation.r2, rotation.r3, rotation.r4) == (True, False, False, False)
    assert (rotation.backbone, rotation.v_proj, rotation.online_r1_rotation) == ("model", "self_attn.v_proj", None)
    assert OnlineRotationConfig(shared_parallel=True).online_rotation_layers is None


@pytest.mark.parametrize("make", [AWQConfig, SmoothQuantConfig, AutoSmoothQuantConfig])
def test_keywords_that_only_older_documents_have_are_taken_and_never_written(make: Any) -> None:
    old = make(embedding_layers=["model.embed_tokens"], num_attention_heads=32, num_key_value_heads=8)
    assert old == make()
    assert old.to_dict() == make().to_dict()


def test_the_sequential_keyword_of_older_documents_is_taken_and_never_written() -> None:
    assert GPTQConfig(true_sequential=True, embedding_layers=["x"]).to_dict() == GPTQConfig().to_dict()


def test_the_older_name_of_rotations_means_all_four(tmp_path: Path) -> None:
    path = tmp_path / "algorithm.json"
    path.write_text(json.dumps({"name": "quarot", "scaling_layers": []}), encoding="utf-8")
    config = load_quant_algo_config_from_file(path)
    assert config == QuaRotConfig(scaling_layers=[])
    assert (config.name, config.r1, config.r2, config.r3, config.r4) == ("rotation", True, True, True, True)  # type: ignore[attr-defined]


def test_the_older_keyword_for_random_rotations_sets_both() -> None:
    config = RotationConfig(scaling_layers=[], random=True)
    assert (config.random_r1, config.random_r2) == (True, True)
    assert dataclasses.replace(config, random_r2=False).random_r2 is False


def test_settings_of_online_rotations_are_read_from_a_dict() -> None:
    config = RotationConfig.from_dict({"name": "rotation", "scaling_layers": [], "online_config": {"shared_parallel": True}})
    assert config.online_config == OnlineRotationConfig(shared_parallel=True)
    assert RotationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GPTQConfig(desc_act=True, static_groups=False), "static_groups=True, or desc_act=False"),
        (lambda: QronosConfig(inside_layer_modules=[], model_decoder_layers="", static_groups=False), "static_groups"),
        (lambda: GPTQConfig(block_size=0), "block_size"),
        (lambda: GPTQConfig(damp_percent=1.0), "damp_percent"),
        (lambda: SmoothQuantConfig(alpha=1.5), "alpha"),
        (lambda: SmoothQuantConfig(scale_clamp_min=0), "scale_clamp_min"),
        (lambda: AutoSmoothQuantConfig(compute_scale_loss="MAX"), "compute_scale_loss"),
    ],
)
def test_values_out_of_their_range_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("kind", "given", "names"),
    [
        (GPTQConfig, ("gptq", 64, 0.02, False, True, ["a"], "b"), ("name", "block_size", "damp_percent", "desc_act", "static_groups")),
        (GPTAQConfig, ("gptaq", 64, 0.02, False, True, ["a"], "b", 0.5), ("name", "block_size", "damp_percent", "desc_act")),
        (QronosConfig, (["a"], "b", "qronos", 64), ("inside_layer_modules", "model_decoder_layers", "name", "block_size")),
        (RotationConfig, ({}, True, True), ("scaling_layers", "r1", "r2")),
    ],
)
def test_arguments_may_be_positional_in_the_order_of_amd_quark(kind: type[Any], given: tuple[Any, ...], names: tuple[str, ...]) -> None:
    settings = kind(*given)
    assert [getattr(settings, name) for name in names] == list(given[: len(names)])
    with pytest.raises(TypeError, match="by position and by name"):
        kind(*given, **{names[0]: given[0]})
    with pytest.raises(TypeError, match="takes at most"):
        kind(*range(30))
