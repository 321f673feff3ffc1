"""Rotation in whole runs: the function stays, checkpoints reload, what is not offered is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.algorithms import BlockContext
from quark.errors import UnsupportedError
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.transform import Rotate

DATA = tiny.calibration_batches(4, 96)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(DATA[0].to(torch.long)).logits
    return found


def settings(**changes: object) -> RotationConfig:
    derived = LLMTemplate.get("llama").algo_config["rotation"]
    assert isinstance(derived, RotationConfig)
    return attrs.evolve(derived, **changes)


@pytest.mark.parametrize("changes", [{}, {"r2": True}, {"rotation_size": 32}, {"random_r1": True, "r2": True, "random_r2": True}], ids=str)
def test_a_rotated_model_computes_what_it_did(changes: dict[str, object]) -> None:
    model = tiny.tiny_model(torch.float64)
    expected, facts = logits(model), architecture_of(model)
    assert facts is not None
    plan = make_plan(model, LLMTemplate.get("llama").get_config("int4_wo_128"), facts)
    run = Rotate(settings(**changes)).start(model, plan)
    run.apply_global(model)
    before = model.model.layers[0].self_attn.q_proj.weight.clone()
    for i, block in enumerate(model.model.layers):
        run.apply(BlockContext(f"model.layers.{i}", block, facts, {}, {}))
    assert not torch.equal(before, model.model.layers[0].self_attn.q_proj.weight)
    # The norms of this architecture compute in float32 whatever the model's dtype is.
    assert float((logits(model) - expected).abs().max()) < 1e-6 * float(expected.abs().max())


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [pytest.param(["rotation"], marks=pytest.mark.slow), ["gptq", "awq", "rotation"]], ids="+".join)
def test_a_rotated_model_is_quantized_exported_and_read_back(algorithm: list[str], tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_128", algorithm=algorithm)
    config.algo_config = [attrs.evolve(a, preset="reference") for a in config.algo_config or []]
    model = ModelQuantizer(config).quantize_model(tiny.tiny_model(torch.bfloat16), DATA)
    export_safetensors(model, tmp_path / "memory")
    again = import_model_from_safetensors(None, str(tmp_path / "memory"), device="cpu")
    assert torch.equal(logits(again), logits(model))
    quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "disk", config, DATA)
    assert (tmp_path / "disk" / "model.safetensors").read_bytes() == (tmp_path / "memory" / "model.safetensors").read_bytes()


def test_without_data_rotation_says_that_nothing_judges_it(caplog: pytest.LogCaptureFixture) -> None:
    ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_128", algorithm="rotation")).quantize_model(tiny.tiny_model())
    assert any("rotation is not validated" in r.message for r in caplog.records)


def rotated(scheme: str, preset: str) -> Any:
    config = LLMTemplate.get("llama").get_config(scheme)
    config.algo_config = [settings(preset=preset)]
    return ModelQuantizer(config).quantize_model(tiny.tiny_model(), DATA)


def test_rotation_that_does_harm_is_left_out_with_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    model = rotated("nvfp4", "best")
    plain = ModelQuantizer(LLMTemplate.get("llama").get_config("nvfp4")).quantize_model(tiny.tiny_model(), DATA)
    assert torch.equal(logits(model), logits(plain))
    assert model.quant_config.algo_config is None
    assert any("it is left out" in r.message and "times as large" in r.message for r in caplog.records)
    found = model.quark_report.validated["rotation"]
    assert found["error_after"] > found["error_before"] + found["standard_error"] > 0
    assert found["held_out"]
    assert not found["applied"]
    assert "skipped, no gain on held-out tokens: rotation" in model.quark_plan.notes
    assert not [note for note in model.quark_plan.notes if "transformed by" in note]


def test_the_reference_preset_rotates_where_it_does_harm_and_says_how_much(caplog: pytest.LogCaptureFixture) -> None:
    model = rotated("nvfp4", "reference")
    assert any("it is applied" in r.message and "times as large" in r.message for r in caplog.records)
    assert model.quark_report.validated["rotation"]["applied"]
    assert model.quark_report.transformed["model.layers.0"]["r1"]


def test_rotation_that_does_good_is_applied_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    model = rotated("int8", "best")
    found = model.quark_report.validated["rotation"]
    assert found["error_after"] < found["error_before"]
    assert model.quark_report.transformed["model.layers.0"]["r1"]
    assert not [r for r in caplog.records if "otation" in r.message and r.levelname == "WARNING"]


@pytest.mark.parametrize("field", ["trainable", "train_smooth"])
def test_rotations_that_are_learnt_are_refused_before_any_work(field: str) -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_128")
    config.algo_config = [settings(**{field: True})]
    with pytest.raises(UnsupportedError, match=f"rotation with {field} is not supported"):
        ModelQuantizer(config).quantize_model(tiny.tiny_model())


def test_a_family_that_cannot_be_rotated_says_why() -> None:
    with pytest.raises(UnsupportedError, match=r"r1: it has several residual streams.*; r2: its template names no value projection"):
        LLMTemplate.get("deepseek_v4").get_config("int4_wo_128", algorithm="rotation")


def test_parts_are_judged_apart_with_the_fewest_first() -> None:
    parts = settings(r1=True, r2=True, r3=True, r4=True).parts()
    assert list(parts) == ["r3", "r1", "r2", "online", "r1 + r2", "r1 + online", "r2 + online"]
    assert [(p.r1, p.r2, p.r4) for p in parts.values()] == [
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (True, True, False),
        (True, False, True),
        (False, True, True),
    ]
    assert all(p.r3 for p in parts.values()), "R3 changes no output of a block whose layers are rounded"
    assert settings(r1=True, r4=False).parts() == {}, "the whole is the only part"
    online = settings(r1=True, online_r1_rotation=True, r2=True, r4=True)
    assert [(p.r1, p.r2, p.r4) for p in online.parts().values()] == [(False, True, False), (True, False, True)]
    assert Rotate(settings(r2=True, r4=True, preset="reference")).alternatives() == {}


def with_massive_activations() -> Any:
    """The tiny model with one channel of enormous values in the MLP of its second block.

    Some channels of most models have such values.
    """
    model = tiny.tiny_model()
    up, down = (model.get_submodule(f"model.layers.1.mlp.{name}") for name in ("up_proj", "down_proj"))
    with torch.no_grad():
        up.weight[5] *= 3000
        down.weight[:, 5] /= 30
    return model


def run_of(preset: str, *algorithms: str, **changes: object) -> Any:
    config = LLMTemplate.get("llama").get_config("int8", algorithm=["rotation", *algorithms])
    config.algo_config = [
        attrs.evolve(a, preset=preset, **changes) if isinstance(a, RotationConfig) else a for a in config.algo_config or []
    ]
    return ModelQuantizer(config).quantize_model(with_massive_activations(), DATA)


def test_only_the_parts_that_do_good_are_applied_and_kept_in_the_settings(tmp_path: Path) -> None:
    model = run_of("best", "smoothquant", r2=True, r4=True)
    found = model.quark_report.validated["rotation"]
    assert found["applied"]
    assert set(found["errors"]) == {"r1", "r2", "online", "r1 + r2", "r1 + online", "r2 + online", "all"}
    chosen = found["chosen"]
    assert found["errors"][chosen] == found["error_after"] < found["error_before"]
    assert found["error_after"] <= min(found["errors"].values()) + found["standard_error"]
    kept = next(a for a in model.quant_config.algo_config if isinstance(a, RotationConfig))
    names = ["r1", "r2", "online"] if chosen == "all" else chosen.split(" + ")
    assert (kept.r1, kept.r2, kept.r4) == tuple(name in names for name in ("r1", "r2", "online"))
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, str(tmp_path / "out"), device="cpu")), logits(model))


def test_scale_that_has_moved_before_makes_an_online_rotation_better() -> None:
    """An enormous channel that a rotation spreads over all others is a part of each.

    SmoothQuant's scale makes it an ordinary one.
    """
    exact = logits(with_massive_activations())
    errors = []
    for algorithms in ((), ("smoothquant",)):
        rotated_ = logits(run_of("reference", *algorithms, r1=False, r4=True))
        errors.append(float((rotated_ - exact).norm() / exact.norm()))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize(
    "wrong", [{"norm_subtracts_mean": True}, {"norm_has_unit_offset": True}, {"norm_subtracts_mean": True, "norm_has_unit_offset": True}]
)
def test_norms_are_taken_for_what_they_compute_whatever_the_template_says(
    wrong: dict[str, bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rotated() -> Tensor:
        config = LLMTemplate.get("llama").get_config("int4_wo_128")
        config.algo_config = [settings(preset="reference", r2=True)]
        return logits(ModelQuantizer(config).quantize_model(tiny.tiny_model(), DATA))

    expected = rotated()
    assert "says norm_" not in caplog.text
    monkeypatch.setattr("quark.runs.run.architecture_of", lambda model: attrs.evolve(architecture_of(model), **wrong))  # type: ignore[arg-type]
    assert torch.equal(rotated(), expected)
    assert "The template of 'llama' says norm_subtracts_mean=" in caplog.text
    assert "the norms of this model do not subtract the mean and multiply by their weight" in caplog.text
