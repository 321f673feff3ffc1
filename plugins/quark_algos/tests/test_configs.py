"""Configuration classes of the algorithms.

Defaults, keywords of every generation, JSON, and what is refused.
"""

from __future__ import annotations

import dataclasses
import inspect
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
from quark_algos.tuning.documented import AutoRoundConfig, BlockwiseJointTuningConfig, BlockwiseTuningConfig

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


MODULES = {"inside_layer_modules": ["mlp.up_proj"], "model_decoder_layers": "blocks"}
BY_POSITION: dict[type[Any], dict[str, Any]] = {
    AWQConfig: {"name": "awq", "scaling_layers": [{}], "model_decoder_layers": "blocks"},
    SmoothQuantConfig: {"name": "smooth", "alpha": 0.5, "scale_clamp_min": 0.01, "scaling_layers": [{}], "model_decoder_layers": "blocks"},
    AutoSmoothQuantConfig: {
        **{"name": "autosmoothquant", "scaling_layers": [{}], "model_decoder_layers": "blocks", "compute_scale_loss": "MAE"},
    },
    RotationConfig: {
        **{"scaling_layers": {}, "name": "rotation", "r1": False, "r2": True, "r3": True, "r4": True, "rotation_size": 64},
        **{"random_r1": True, "random_r2": True, "backbone": "base", "model_decoder_layers": "blocks", "v_proj": "v", "o_proj": "o"},
        **{"self_attn": "attention", "mlp": "ffn", "online_r1_rotation": True, "online_config": OnlineRotationConfig(shared_parallel=True)},
        **{"trainable": True, "train_smooth": True, "smooth_positions": ["q"]},
    },
    OnlineRotationConfig: {"shared_parallel": True, "online_rotation_layers": ["a"], "use_input_prescale": True},
    GPTQConfig: {"name": "gptq", "block_size": 64, "damp_percent": 0.02, "desc_act": False, "static_groups": False, **MODULES},
    GPTAQConfig: {
        **{"name": "gptaq", "block_size": 64, "damp_percent": 0.02, "alpha": 0.5, "desc_act": False, "static_groups": False, **MODULES},
    },
    QronosConfig: {**MODULES, "name": "qronos", "block_size": 64, "desc_act": False, "static_groups": False, "alpha": 0.01, "beta": 10.0},
    AutoRoundConfig: {
        **{"name": "autoround", "iters": 9, "lr": 0.1, "enable_minmax_tuning": False, "minmax_lr": 0.2, "batch_size": 4, **MODULES},
    },
    BlockwiseTuningConfig: {
        **{"name": "tuning", "epochs": 2, "weight_lr": 0.1, "weight_decay": 0.2, "min_lr_factor": 0.3, "max_grad_norm": 0.4},
        **{"model_decoder_layers": "blocks", "trainable_modules": ["a"]},
    },
    BlockwiseJointTuningConfig: {
        **{"name": "tuning", "epochs": 2, "weight_lr": 0.1, "qparam_lr": 0.2, "weight_decay": 0.3, "qparam_weight_decay": 0.4},
        **{"min_lr_factor": 0.5, "max_grad_norm": 0.6, "model_decoder_layers": "blocks", "trainable_modules": ["a"]},
        **{"quant_trainable_modules": ["b"]},
    },
}
"""Arguments of the settings of algorithms, in the order of the classes of AMD Quark 0.13."""


@pytest.mark.parametrize("kind", BY_POSITION, ids=lambda kind: kind.__name__)
def test_arguments_may_be_positional_in_the_order_of_amd_quark(kind: type[Any]) -> None:
    by_name = BY_POSITION[kind]
    settings = kind(*by_name.values())
    assert {name: getattr(settings, name) for name in by_name} == by_name
    parameters = inspect.signature(kind).parameters.values()
    assert [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD] == list(by_name)
    first = next(iter(by_name))
    with pytest.raises(TypeError, match=f"{kind.__name__} got '{first}' both by position and by name"):
        kind(*by_name.values(), **{first: by_name[first]})
    with pytest.raises(TypeError, match="takes at most"):
        kind(*range(30))
