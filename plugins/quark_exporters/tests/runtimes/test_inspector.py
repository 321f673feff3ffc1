"""Support of vLLM and SGLang for our checkpoints, and for broken ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import quark
from quark.checkpoint.export import export_with
from quark.checkpoint.inspection import Inspection, RuntimeSupport, inspect_checkpoint
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.torch import LLMTemplate, ModelQuantizer
from quark_devkit.small_models import quantized, run_config
from quark_exporters.runtimes.inspector import rule_for, rules
from quark_tiny_model import tiny_model

LOADED_BY: dict[tuple[str, str], set[str]] = {
    ("safetensors", "int4_wo_64"): {"vllm_cuda", "vllm_rocm", "vllm_cpu"},
    ("safetensors", "ptpc_fp8"): {"vllm_cuda", "vllm_rocm", "vllm_cpu", "sglang"},
    ("safetensors", "mxfp4"): {"vllm_cuda", "vllm_rocm", "sglang"},
    ("safetensors", "amdfp4"): set(),
    ("compressed_tensors", "int4_wo_per_channel"): {"vllm_cuda", "vllm_rocm", "vllm_cpu", "sglang"},
    ("compressed_tensors", "int8"): {"vllm_cuda", "vllm_rocm", "vllm_cpu", "sglang"},
    ("awq", "int4_wo_32"): {"vllm_cuda", "vllm_rocm", "vllm_cpu", "sglang"},
    ("fp8", "fp8"): {"vllm_cuda", "vllm_rocm", "sglang"},
}
"""What section 5 of the rules' sources says; CPUs have been run."""


def exported(config: Any, directory: Path, layout: str = "safetensors") -> Path:
    export_with(layout, quantized(config), directory / "out")
    return directory / "out"


def support_of(inspection: Inspection, runtime: str = "vllm_cuda") -> RuntimeSupport:
    return next(support for support in inspection.runtimes if support.runtime == runtime)


@pytest.mark.parametrize(("layout", "scheme"), LOADED_BY)
def test_runtimes_load_what_their_rules_say(layout: str, scheme: str, tmp_path: Path) -> None:
    inspection = inspect_checkpoint(exported(run_config(scheme), tmp_path, layout))
    assert (inspection.layout, inspection.damage) == (layout, ())
    assert {support.runtime for support in inspection.runtimes if support.loads} == LOADED_BY[layout, scheme] | {"quark_vllm"}
    assert {support.runtime for support in inspection.runtimes} == set(rules().runtimes) | {"quark_vllm"}


METHODS = {
    ("safetensors", "int8"): "QuarkW8A8Int8",
    ("safetensors", "mxfp4_fp8"): "QuarkW4A8_MXFP4_FP8",
    ("safetensors", "nvfp4"): "QuarkNVFP4",
    ("safetensors", "int4_wo_per_channel"): None,
    ("safetensors", "int4_wa_64"): None,
    ("compressed_tensors", "nvfp4"): "CompressedTensorsW4A4Fp4",
    ("compressed_tensors", "mxfp4_weight_only"): "CompressedTensorsW4A4Mxfp4",
    ("compressed_tensors", "fp8"): "CompressedTensorsW8A8Fp8",
    ("awq", "uint4_wo_128"): "AutoAWQMarlinLinearMethod",
}


@pytest.mark.parametrize(("layout", "scheme"), METHODS)
def test_the_first_rule_that_fits_names_the_method(layout: str, scheme: str) -> None:
    rule = rule_for(layout, quark.schemes().load_config(scheme)())
    assert (None if rule is None else rule.method) == METHODS[layout, scheme]


@pytest.mark.parametrize(("layout", "scheme"), METHODS)
def test_no_rule_fits_groups_along_output_channels(layout: str, scheme: str) -> None:
    config = quark.schemes().load_config(scheme)()
    if isinstance(config.weight, QTensorConfig) and config.weight.group_size is not None:
        assert rule_for(layout, attrs.evolve(config, weight=config.weight.set(ch_axis=0))) is None


def test_every_rule_is_of_known_runtimes_and_layouts() -> None:
    known = {record.name for record in quark.exporters() if record.inspector is not None}
    for rule in rules().rules:
        assert rule.layout in known
        assert {*rule.on, *rule.refused} <= rules().runtimes.keys()
        assert not {*rule.on} & {*rule.refused}


def head(config: Any) -> Any:
    config.exclude = []
    return config


def without_scales_in_common(_: Any) -> Any:
    return run_config("nvfp4")


def parts_apart(config: Any) -> Any:
    config.layer_quant_config = {"*up_proj": quark.schemes().load_config("ptpc_fp8")()}
    return config


def part_float(config: Any) -> Any:
    config.layer_quant_config = {"*k_proj": QLayerConfig()}
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (head, r"the output head is quantized.*\(lm_head\)"),
        (parts_apart, "fuse gate_up_proj.*different schemes"),
        (part_float, "fuse qkv_proj.*different schemes"),
        (without_scales_in_common, "one tensor scale for all parts"),
    ],
)
def test_what_runtimes_fuse_or_leave_float_is_said(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    support = support_of(inspect_checkpoint(exported(change(run_config("int4_wo_32")), tmp_path)))
    assert not support.loads
    assert [reason for reason in support.refusals if re.search(message, reason)]


EXPERTS = {
    ("safetensors", "int4_wo_32"): ("QuarkW4A16Int4MoEMethod", {"vllm_cuda", "vllm_rocm"}),
    ("safetensors", "mxfp4_fp8"): ("QuarkOCP_MX_MoEMethod", {"vllm_cuda", "vllm_rocm"}),
    ("safetensors", "ptpc_fp8"): ("QuarkW8A8Fp8MoEMethod", {"vllm_cuda", "vllm_rocm", "sglang"}),
    ("compressed_tensors", "uint4_wo_64"): ("CompressedTensorsWNA16MoEMethod", {"vllm_cuda", "vllm_rocm", "sglang"}),
    ("awq", "uint4_wo_32"): ("AutoAWQMoEMethod", {"vllm_cuda", "sglang"}),
}
"""Method of experts, and the runtimes that load a mixture whose attention is quantized likewise."""


def mixture(config: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)).eval()
    return ModelQuantizer(config).quantize_model(model, [torch.arange(64).reshape(2, 32)])


@pytest.mark.parametrize(("layout", "scheme"), EXPERTS)
def test_experts_have_methods_of_their_own(layout: str, scheme: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("mixtral").get_config(scheme)
    method, loaded_by = EXPERTS[layout, scheme]
    export_with(layout, mixture(config), tmp_path / "out")
    support = support_of(inspect_checkpoint(tmp_path / "out"))
    (named,) = [name for name, layers in support.methods.items() if ".experts." in layers]
    assert named.partition(":")[0] == method
    assert any(".experts." not in layers for layers in support.methods.values())
    assert {one.runtime for one in inspect_checkpoint(tmp_path / "out").runtimes if one.loads} >= loaded_by - {"sglang"}


def test_experts_of_a_mixture_are_quantized_alike(tmp_path: Path) -> None:
    config = LLMTemplate.get("mixtral").get_config("int4_wo_32")
    config.layer_quant_config = {"*experts.1.*": quark.schemes().load_config("ptpc_fp8")()}
    export_with("safetensors", mixture(config), tmp_path / "out")
    support = support_of(inspect_checkpoint(tmp_path / "out"))
    assert [reason for reason in support.refusals if re.search(r"experts of model\.layers\.0\.mlp.*different schemes", reason)]


def test_a_head_that_is_tied_to_the_embedding_is_not_missing(tmp_path: Path) -> None:
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_64")).quantize_model(tiny_model())
    assert model.config.tie_word_embeddings
    for layout in ("safetensors", "awq"):
        export_with(layout, model, tmp_path / layout)
        assert inspect_checkpoint(tmp_path / layout).damage == ()


def test_a_cache_has_a_note(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="ptpc_fp8", kv_cache_scheme="fp8")
    support = support_of(inspect_checkpoint(exported(config, tmp_path)))
    assert support.loads
    assert "kv_cache_dtype=fp8" in support.notes[0]


def test_a_cache_of_one_block_has_the_note_too(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="ptpc_fp8", kv_cache_scheme="fp8")
    cached = next(iter(config.kv_cache_quant_config.values()))
    config.kv_cache_quant_config = {f"model.layers.0.self_attn.{name}": cached for name in ("k_proj", "v_proj")}
    assert "kv_cache_dtype=fp8" in support_of(inspect_checkpoint(exported(config, tmp_path))).notes[0]


def test_other_caches_are_served_by_quark_vllm_alone(tmp_path: Path) -> None:
    for cache in ("fp8_per_head", "int8", "nvfp4"):
        config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32", kv_cache_scheme=cache)
        inspection = inspect_checkpoint(exported(config, tmp_path / cache))
        for runtime in ("vllm_cuda", "vllm_cpu", "sglang"):
            support = support_of(inspection, runtime)
            assert any("KV cache" in reason and "self_attn" in reason for reason in support.refusals)
            assert support.notes == ()
        assert support_of(inspection, "quark_vllm").loads
        assert support_of(inspection, "vllm_cpu").own_layers, "vLLM's kernels still compute its layers"


def test_scales_of_heads_in_the_layout_of_compressed_tensors_have_a_note_of_each_runtime(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_32", kv_cache_scheme="fp8_per_head")
    inspection = inspect_checkpoint(exported(config, tmp_path, "compressed_tensors"))
    words = {"vllm_cuda": "FlashAttention 3", "vllm_cpu": "largest scale of all heads", "sglang": "ignores"}
    for runtime, word in words.items():
        support = support_of(inspection, runtime)
        assert support.loads
        assert word in support.notes[0]


def changed_block(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def test_configurations_of_others_are_read_as_runtimes_read_them(tmp_path: Path) -> None:
    out = exported(run_config("int4_wo_32", exclude=("*o_proj",)), tmp_path)
    assert support_of(inspect_checkpoint(out)).loads
    changed_block(out, lambda block: block.update(exclude=["lm_head", "*o_proj"]))
    assert any("by a pattern" in reason for reason in support_of(inspect_checkpoint(out)).refusals)
    changed_block(out, lambda block: block.pop("export"))
    assert any("lacks export" in reason for reason in support_of(inspect_checkpoint(out)).refusals)


def changed_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


NAME = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("layout", ["safetensors", "compressed_tensors", "awq"])
@pytest.mark.parametrize("damage", ["missing", "shape", "nan", "strange"])
def test_damage_is_named(layout: str, damage: str, tmp_path: Path) -> None:
    out = exported(run_config("uint4_wo_32"), tmp_path, layout)
    scale = f"{NAME}.scales" if layout == "awq" else f"{NAME}.weight_scale"

    def change(tensors: dict[str, Tensor]) -> None:
        own = tensors.pop(scale)
        if damage == "strange":
            tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(2, 2)
        if damage != "missing":
            tensors[scale] = {"shape": own[:1].clone(), "nan": own * torch.nan}.get(damage, own)

    changed_tensors(out, change)
    inspection = inspect_checkpoint(out)
    wanted = {"missing": "lacks 1 tensor", "shape": "has the shape", "nan": "NaN", "strange": "no place"}[damage]
    assert [what for what in inspection.damage if wanted in what]
    assert inspection.runtimes == ()


def test_the_plugin_of_vllm_serves_what_vllm_alone_refuses_but_no_probabilities(tmp_path: Path) -> None:
    served = inspect_checkpoint(exported(head(run_config("mx6")), tmp_path / "whole"))
    assert [one.runtime for one in served.runtimes if one.loads] == ["quark_vllm"]
    ((method, names),) = support_of(served, "quark_vllm").methods.items()
    assert method == "quark_simulate: if vLLM itself does not load it; or --quantization quark_packed"
    assert names.endswith("and 5 more"), "of the blocks and the head"
    probabilities = LLMTemplate.get("llama").get_config("fp8", attention_scheme="fp8")
    refused = support_of(inspect_checkpoint(exported(probabilities, tmp_path / "refused")), "quark_vllm")
    assert refused.refusals == ("it quantizes attention probabilities, which fused kernels never store",)


@pytest.mark.parametrize("rotates", [False, True])
def test_layers_that_vllm_has_kernels_for_are_named_where_it_refuses_others(rotates: bool, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("ptpc_fp8", algorithm=["rotation"] if rotates else None)
    config.layer_quant_config = {"*mlp*": quark.schemes().load_config("mx6")()}
    config.algo_config = [attrs.evolve(settings, r4=True, preset="reference") for settings in config.algo_config or ()]
    inspection = inspect_checkpoint(exported(config, tmp_path))
    assert "own_layers" not in inspection.to_dict()["runtimes"][0]
    expected = {f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qkvo"}
    support, served = support_of(inspection, "vllm_cpu"), support_of(inspection, "quark_vllm")
    assert not support.loads
    assert support.own_layers == (set() if rotates else expected), "a run-time rotation is not in its layers"
    own = {method: names for method, names in served.methods.items() if method.startswith("vLLM's own on CPUs")}
    assert bool(own) is not rotates


def test_the_program_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quark.errors import CheckpointError
    from quark_workbench.commands.inspect import inspect

    out = exported(run_config("int4_wo_32"), tmp_path)
    inspect(out)
    printed = capsys.readouterr().out
    assert "vllm_cpu (vLLM 0.32 on CPUs): loads it" in printed
    assert "sglang (SGLang on AMD and NVIDIA GPUs): does not load it" in printed
    inspect(out, as_json=True)
    assert json.loads(capsys.readouterr().out)["runtimes"][0]["loads"] is True
    changed_tensors(out, lambda tensors: tensors.pop(f"{NAME}.weight_scale"))
    with pytest.raises(CheckpointError, match="is damaged"):
        inspect(out)
