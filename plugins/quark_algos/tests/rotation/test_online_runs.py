"""Rotations that run with the model, in whole runs.

What is quantized is rotated, exports reload to the last bit, the rest says why not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.algorithms import Hessian
from quark.calibration.held_out import held_out_tokens
from quark.config.model import QConfig
from quark.errors import CheckpointError, ConfigError, UnsupportedError
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_algos.gptq.gptq import ColumnRounding
from quark_algos.rotation.choice import online_layers
from quark_algos.rotation.config import QuaRotConfig, RotationConfig
from quark_algos.rotation.online import InputRotation, is_rotated

DATA = tiny.calibration_batches(4, 96)
DOWN = "model.layers.0.mlp.down_proj"
WIDTH = 384  # of the tiny model's MLP


def rotated(scheme: str, *algorithms: str, asked: dict[str, Any] | None = None, **options: Any) -> QConfig:
    """A configuration with R4 alone, unless other settings are asked for.

    It is applied whether it does good or not.
    """
    config = LLMTemplate.get("llama").get_config(scheme, algorithm=[*algorithms, "rotation"], **options)
    changes = {"r1": False, "r4": True, "preset": "reference", **(asked or {})}
    config.algo_config = [attrs.evolve(a, **changes) if isinstance(a, RotationConfig) else a for a in config.algo_config or []]
    return config


def quantized(config: QConfig) -> Any:
    return ModelQuantizer(config).quantize_model(tiny.tiny_model(), DATA)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(DATA[0].to(torch.long)).logits
    return found


def settings_of(model: Any) -> RotationConfig:
    (found,) = [a for a in model.quant_config.algo_config if isinstance(a, RotationConfig)]
    return found


def inputs_of_down() -> Tensor:
    """Return the float model's input to the first layer that closes an MLP, rotated; all tokens."""
    model, seen = tiny.tiny_model(), []
    model.get_submodule(DOWN).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for batch in DATA:
            model(batch.to(torch.long))
    return InputRotation(WIDTH).apply(torch.cat([x.flatten(0, -2) for x in seen]))


CASES = [("fp8", ()), ("int8", ("gptq",)), ("mxfp4", ("smoothquant",)), ("int4_wo_32", ("awq", "gptq"))]


@pytest.mark.thorough
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("scheme", "algorithms"), CASES, ids=str)
@pytest.mark.parametrize("size", [None, 32])
def test_a_model_with_r4_reloads_to_the_last_bit_by_both_readers(
    scheme: str, algorithms: tuple[str, ...], size: int | None, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = quantized(rotated(scheme, *algorithms, asked={"r1": True, "r2": True, "rotation_size": size}))
    expected, out = logits(model), tmp_path / "out"
    assert float((expected - logits(tiny.tiny_model())).norm() / logits(tiny.tiny_model()).norm()) < 0.1
    export_safetensors(model, out)
    assert load_file(out / "model.safetensors")[f"shared_input_rotation_{size or WIDTH}"].shape == (size or WIDTH,) * 2
    again = import_model_from_safetensors(None, out, device="cpu")
    assert torch.equal(logits(again), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out, local_files_only=True)), expected)
    export_safetensors(again, tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


def test_from_disk_comes_the_same_checkpoint(tmp_path: Path) -> None:
    config = rotated("int4_wo_32", "gptq")
    export_safetensors(ModelQuantizer(config).quantize_model(tiny.tiny_model(torch.bfloat16), DATA), tmp_path / "memory")
    plan = quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "disk", config, DATA)
    assert (tmp_path / "disk" / "model.safetensors").read_bytes() == (tmp_path / "memory" / "model.safetensors").read_bytes()
    assert any("inputs of 3 layers are rotated while the model runs, in blocks of 384" in note for note in plan.notes)


def test_the_scale_of_a_static_input_is_that_of_the_rotated_one() -> None:
    model = quantized(rotated("fp8"))
    scale = model.get_submodule(DOWN).input_quantizer.scale
    assert torch.allclose(scale, inputs_of_down().abs().amax() / torch.finfo(torch.float8_e4m3fn).max, rtol=1e-6)


def test_gptq_goes_by_the_second_moment_of_the_rotated_input(monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = rotated("int4_wo_32", "gptq"), {}
    config.exclude = ["lm_head", "*self_attn*", "*gate_proj", "*up_proj"]  # so that what comes before the layer is float
    plain = ColumnRounding.round

    def listening(self: ColumnRounding, problem: Any) -> Any:
        seen.update({name: problem.statistic(Hessian).matrix() for name in problem.layers})
        return plain(self, problem)

    monkeypatch.setattr(ColumnRounding, "round", listening)
    quantized(config)
    x = inputs_of_down().double()
    x = x[held_out_tokens(len(x)) :]
    found = seen[DOWN].double()
    expected = x.t() @ x * (float(found.trace()) / float((x.t() @ x).trace()))  # sum or mean, the shape is the same
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_the_layers_are_named_in_plan_settings_and_findings() -> None:
    model = quantized(rotated("mxfp4", asked={"rotation_size": 32}))
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    online = settings_of(model).online_config
    assert online is not None
    assert online.online_rotation_layers == names
    assert [model.quark_report.transformed[name]["input_rotation"] for name in names] == [32] * 3
    assert [name for name, module in model.named_modules() if is_rotated(module)] == names


def test_layers_that_stay_float_are_not_rotated_nor_is_anything_if_all_do() -> None:
    config = rotated("int4_wo_32")
    config.exclude = [*config.exclude, "*layers.1.mlp.down_proj"]
    assert [n for n, m in quantized(config).named_modules() if is_rotated(m)] == [DOWN, DOWN.replace("0", "2")]
    config.exclude = [*config.exclude, "*down_proj"]
    model = quantized(config)
    assert not settings_of(model).runs_with_model()
    assert any("r4 is left out" in note for note in model.quark_plan.notes)


def test_a_family_whose_mlps_are_not_known_must_name_the_layers() -> None:
    model, config = tiny.tiny_model(), rotated("int4_wo_32")
    plan = ModelQuantizer(config).plan(model)
    unknown = attrs.evolve(plan, architecture=attrs.evolve(plan.architecture, mlp_output=None))
    with pytest.raises(UnsupportedError, match="template of llama does not name them"):
        online_layers(RotationConfig(scaling_layers=[], r4=True), model, unknown)


def test_layers_can_be_named_and_must_be_there() -> None:
    named = {"r4": False, "online_config": {"shared_parallel": False, "online_rotation_layers": [DOWN]}}
    model = quantized(rotated("int4_wo_32", asked=named))
    assert [n for n, m in model.named_modules() if is_rotated(m)] == [DOWN]
    named["online_config"] = {"shared_parallel": False, "online_rotation_layers": ["model.layers.9.mlp.down_proj"]}
    with pytest.raises(ConfigError, match=r"online_rotation_layers names 'model.layers.9.mlp.down_proj'"):
        quantized(rotated("int4_wo_32", asked=named))


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_r1_online_rotates_the_inputs_of_what_reads_the_residual_stream(scheme: str, tmp_path: Path) -> None:
    model = quantized(rotated(scheme, "gptq", asked={"r1": True, "r4": False, "online_r1_rotation": True, "rotation_size": 32}))
    inside = {n.removeprefix("model.layers.0.") for n, m in model.named_modules() if is_rotated(m) and n.startswith("model.layers.0.")}
    assert inside == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
    assert torch.equal(model.model.embed_tokens.weight, tiny.tiny_model().get_submodule("model.embed_tokens").weight)
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), logits(model))


@pytest.mark.parametrize("algorithm", ["awq", "smoothquant"])
def test_scale_is_moved_into_a_layer_before_its_input_is_rotated(algorithm: str) -> None:
    """Of one block, whose equalization is forced: the weight is that of the scaled layer, rotated.

    The same without R4, not rotated.
    """
    config = rotated("int4_wo_32", algorithm, asked={"rotation_size": 32})
    config.algo_config = [attrs.evolve(a, preset="reference") for a in config.algo_config or []]
    found = quantized(config).quark_report.transformed
    plain = attrs.evolve(config, algo_config=[a for a in config.algo_config if a.name != "rotation"])
    expected = quantized(plain).quark_report.transformed
    scales = "model.layers.0.mlp.up_proj"
    assert found[scales] == expected[scales]
    assert found[scales]["scale_max"] > found[scales]["scale_min"]
    assert found["model.layers.0.mlp.down_proj"]["input_rotation"] == 32


def test_a_rotated_block_is_shown_to_what_moves_scale_as_it_is_then() -> None:
    """With R1, the stream is rotated before the block.

    A valid mapping must still pass the probe, and its scales be found.
    """
    model = quantized(rotated("int4_wo_32", "awq", asked={"r1": True, "r4": False}))
    errors = [f for f in model.quark_report.transformed.values() if "error_before" in f]
    assert len(errors) == 3
    assert max(f["error_before"] for f in errors) < 0.1


CACHE = {"kv_cache_scheme": "fp8", "kv_cache_post_rope": True}


def test_r3_rotates_queries_and_keys_where_keys_are_quantized_and_reloads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    configs = [rotated("int4_wo_32", asked={"r4": False, "r3": r3}, **CACHE) for r3 in (True, False)]
    model, without = (quantized(attrs.evolve(config, separate_kv_scales=True)) for config in configs)
    keys = [m.get_submodule("model.layers.0.self_attn").key_quantizer.scale for m in (model, without)]
    assert not torch.equal(*keys)
    expected = logits(model)
    assert float((expected - logits(without)).norm() / expected.norm()) < 0.02
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)), expected)


@pytest.mark.parametrize("others", [{}, {"r1": True}, {"r1": True, "r2": True, "r4": True}], ids=str)
def test_the_best_preset_applies_r3_whatever_it_finds_of_the_others(
    others: dict[str, bool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No rotation of layers gains anything with NVFP4 here, and no output shows what R3 does to the cache."""
    asked = {"r1": False, "r4": False, "preset": "best"}
    configs = (rotated("nvfp4", asked={**asked, **more}, **CACHE) for more in ({"r3": False}, {**others, "r3": True}))
    plain, model = (quantized(attrs.evolve(config, separate_kv_scales=True)) for config in configs)
    found = settings_of(model)
    assert (found.r1, found.r2, found.r3, found.r4) == (False, False, True, False)
    keys = [m.get_submodule("model.layers.0.self_attn").key_quantizer.scale for m in (model, plain)]
    assert not torch.equal(*keys)
    assert any("(r3); validation does not measure" in note for note in model.quark_plan.notes)
    assert any("Only r3 is applied" in r.message for r in caplog.records) == bool(others)
    assert model.quark_report.validated.get("rotation", {"chosen": "r3"})["chosen"] == "r3"
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), logits(model))


def test_all_four_go_together_and_r3_is_left_out_where_it_would_do_nothing() -> None:
    asked = {"r1": True, "r2": True, "r3": True, "r4": True}
    both = [quantized(rotated("fp8", asked=asked, **options)) for options in (CACHE, {})]
    assert [settings_of(model).r3 for model in both] == [True, False]
    assert any("r3 is left out" in note for note in both[1].quark_plan.notes)
    assert QuaRotConfig(scaling_layers=[]).runs_with_model()


def test_r3_is_refused_before_any_work_where_heads_have_no_hadamard_matrix() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 22}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_key_value_heads=2, **sizes)).eval()
    before = model.lm_head.weight.clone()
    with pytest.raises(UnsupportedError, match=r"'model.layers.0.self_attn' cannot be rotated \(r3\), because heads have 22 channels"):
        ModelQuantizer(rotated("int4_wo_per_channel", asked={"r3": True}, **CACHE)).quantize_model(model)
    assert torch.equal(model.lm_head.weight, before)
    assert "quark_plan" not in vars(model)


def exported(out: Path) -> Tensor:
    model = quantized(rotated("int4_wo_32", asked={"rotation_size": 32}))
    export_safetensors(model, out)
    return logits(model)


def test_the_older_form_of_a_checkpoint_is_read_too(tmp_path: Path) -> None:
    """A matrix for each layer, and nothing beside settings that says that it runs with the model."""
    out = tmp_path / "out"
    expected, tensors = exported(out), load_file(out / "model.safetensors")
    matrix = tensors.pop("shared_input_rotation_32")
    for i in range(3):
        tensors[f"model.layers.{i}.mlp.down_proj.input_rotation"] = matrix.clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]["run_time_algorithms"]
    config["quantization_config"]["algo_config"][0]["online_config"] = None
    (out / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(import_model_from_safetensors(None, out, device="cpu")), expected)


def test_a_checkpoint_without_its_matrix_is_incomplete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    exported(out)
    tensors = load_file(out / "model.safetensors")
    del tensors["shared_input_rotation_32"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor.*shared_input_rotation_32"):
        import_model_from_safetensors(None, out, device="cpu")


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe"])
def test_transposed_layers_and_experts_are_rotated_too(model_type: str, tmp_path: Path) -> None:
    from .models import IDS, model_of

    config = LLMTemplate.get(model_type).get_config("int4_wo_per_channel", algorithm="gptq")
    config.algo_config = [RotationConfig(scaling_layers=[], r1=False, r4=True, preset="reference"), *(config.algo_config or [])]
    model: Any = ModelQuantizer(config).quantize_model(model_of(model_type, torch.float32), [IDS[:1], IDS[1:]])
    names = [n for n, m in model.named_modules() if is_rotated(m)]
    assert all(n.endswith(("mlp.c_proj", "down_proj")) for n in names)
    assert len(names) == {"gpt2": 2, "qwen3_moe": 6}[model_type]
    export_safetensors(model, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(import_model_from_safetensors(None, tmp_path / "out", device="cpu")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("asked", [{"trainable": True}, {"online_config": {"shared_parallel": False, "use_input_prescale": True}}], ids=str)
def test_what_is_learnt_or_scaled_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="is not supported"):
        quantized(rotated("int4_wo_32", asked=asked))
