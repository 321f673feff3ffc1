"""Layers that come quantized and are not to be quantized stay as they are: codes, scales and configuration.

The checkpoints have the forms of DeepSeek-V3 (FP8 in blocks), Kimi K2 (compressed-tensors, packed integers of
4 bits) and gpt-oss (MXFP4 experts, fused). Their codes are made by the tests' own code, and looked for in
what is written.
"""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quark.checkpoint import export_safetensors, import_model_from_safetensors
from quark.checkpoint.inspection import inspect_checkpoint
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import ConfigError, ResumeError, UnsupportedError
from quark.models.hf.quantized_source import float_tensors_of
from quark.models.hf.shards import check_shards
from quark.models.plan.mixtures import separate_experts
from quark.models.plan.quant_plan import QuantPlan
from quark.runs import from_disk, quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer
from quark_devkit.small_models import batches
from quark_devkit.threads import in_threads
from quark_devkit.whole_runs import interrupted_behind
from quark_tiny_model import tiny_model_dir
from quark_workbench.planning.planned_run import plan

from .kept_layer_forms import (  # noqa: F401
    DEEPSEEK,
    DTYPE,
    FORMS,
    Form,
    assert_kept,
    contents,
    fp8,
    gpt_oss,
    int4,
    made,
    stored_codes,
    tiny_config,
    written_codes,
)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@pytest.fixture
def source(form: Form, tmp_path: Path) -> Path:
    return made(form, tmp_path)


def test_codes_and_scales_are_those_of_the_source(form: Form, source: Path, tmp_path: Path) -> None:
    planned = quantize_checkpoint(source, tmp_path / "out", form.config(), batches())
    assert len(planned.kept) == form.kept
    assert_kept(form, source, tmp_path / "out")


def dequantized(source: Path, out: Path) -> Path:
    """The float checkpoint with the values of a source."""
    out.mkdir(parents=True)
    tensors = load_file(source / "model.safetensors")
    for one in float_tensors_of(source, check_shards(source)) or ():
        tensors[one.name] = one.make(tensors, DTYPE)
    used = ("_scale_inv", "_packed", "_shape", "weight_scale", "_blocks", "_scales")
    floats = {name: tensor.contiguous() for name, tensor in tensors.items() if not name.endswith(used)}
    save_file(floats, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(config))
    return out


@torch.no_grad()
def test_the_export_computes_what_a_model_with_the_dequantized_layers_does(form: Form, source: Path, tmp_path: Path) -> None:
    """With nothing else quantized.

    Inputs are rounded as the source's runtime rounds them, which the float model does not.
    """
    config = QConfig(global_quant_config=QLayerConfig())
    planned = quantize_checkpoint(source, tmp_path / "out", config)
    assert len(planned.kept) >= form.kept
    model = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    floats = AutoModelForCausalLM.from_pretrained(dequantized(source, tmp_path / "floats"), dtype="auto").eval()
    separate_experts(floats, config, planned.kept)
    for name in planned.kept:
        layer = model.get_submodule(name)
        assert torch.equal(layer.weight, floats.get_submodule(name).weight), name
        assert (layer.input_quantizer is not None) == (form.block["quant_method"] == "fp8")
        layer.input_quantizer = None
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(model(ids).logits, floats(ids).logits)


def test_the_configuration_says_how_they_are_quantized(form: Form, source: Path, tmp_path: Path) -> None:
    planned = quantize_checkpoint(source, tmp_path / "out", form.config(), batches())
    block = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert set(planned.kept) <= block["layer_quant_config"].keys()
    assert not set(planned.kept) & set(block["exclude"])
    weight = block["layer_quant_config"][planned.kept[0]]["weight"]
    assert (weight["dtype"], weight["group_size"] or weight["block_size"]) == {
        "DeepSeek": ("fp8_e4m3", [128, 128]),
        "Kimi": ("int4", 32),
        "gpt-oss": ("fp4", 32),
    }[next(name for name, one in FORMS.items() if one is form)]


def test_the_plan_says_so_and_counts_their_bytes(form: Form, source: Path) -> None:
    planned = plan(source, form.config(), probing=False)
    assert planned.plan is not None
    assert planned.estimate is not None
    assert planned.plan.kept
    assert {row.reason.rpartition("; ")[2] for row in planned.plan.rows if row.is_kept} == {"kept as quantized in the source"}
    floats = plan(source, form.config(keep_prequantized_layers=False), probing=False)
    assert floats.estimate is not None
    assert planned.estimate.output is not None
    assert floats.estimate.output is not None
    assert planned.estimate.output.bytes < floats.estimate.output.bytes


def test_inspection_counts_them_as_quantized(form: Form, source: Path, tmp_path: Path) -> None:
    planned = quantize_checkpoint(source, tmp_path / "out", form.config(), batches())
    assert not inspect_checkpoint(tmp_path / "out").damage
    model: Any = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    configs = {row.name: row.config for row in model.quark_plan.rows}
    assert all(configs[row.name] == row.config for row in planned.rows if row.is_kept)


def test_they_are_dequantized_where_the_configuration_says_so(form: Form, source: Path, tmp_path: Path) -> None:
    planned = quantize_checkpoint(source, tmp_path / "out", form.config(keep_prequantized_layers=False), batches())
    assert not planned.kept
    quantize_checkpoint(dequantized(source, tmp_path / "floats"), tmp_path / "expected", form.config(), batches())
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_gptq_rounds_the_others_and_leaves_them(source: Path, form: Form, tmp_path: Path) -> None:
    config = form.config()
    config.algo_config = LLMTemplate.get(form.template).get_config("int4_wo_32", algorithm="gptq").algo_config
    planned = quantize_checkpoint(source, tmp_path / "out", config, batches())
    assert_kept(form, source, tmp_path / "out")
    assert {row.algorithm for row in planned.rows if row.is_kept} == {None}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("algorithm", [None, "gptq"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(algorithm: str | None, source: Path, form: Form, tmp_path: Path) -> None:
    config = form.config()
    if algorithm is not None:
        config.algo_config = LLMTemplate.get(form.template).get_config("int4_wo_32", algorithm=algorithm).algo_config
    quantize_checkpoint(source, tmp_path / "once", config, batches())
    with interrupted_behind(1):
        quantize_checkpoint(source, tmp_path / "out", config, batches())
    with pytest.raises(ResumeError, match="layers that stay as they are"):
        quantize_checkpoint(source, tmp_path / "out", attrs.evolve(config, keep_prequantized_layers=False), batches(), resume=True)
    quantize_checkpoint(source, tmp_path / "out", config, batches(), resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "once")


def test_two_processes_write_the_bytes_of_one(source: Path, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, lock = from_disk.opened_checkpoint, threading.Lock()

    def opened(*args: Any, **kwargs: Any) -> Any:
        with lock:  # transformers sets torch's default dtype meanwhile, which is that of all threads
            return plain(*args, **kwargs)

    monkeypatch.setattr(from_disk, "opened_checkpoint", opened)
    for size in (1, 2):
        work = partial(quantize_checkpoint, source, tmp_path / f"by_{size}", form.config(), batches())
        in_threads(lambda ranks, work=work: work(ranks=ranks), size, is_deterministic=True)
    assert contents(tmp_path / "by_1") == contents(tmp_path / "by_2")
    assert_kept(form, source, tmp_path / "by_2")


def test_a_layout_that_cannot_hold_them_is_refused_before_any_work(tmp_path: Path, source: Path, form: Form) -> None:
    with pytest.raises(UnsupportedError, match=r"keep the quantization of the source: .* keep_prequantized_layers=False") as refusal:
        quantize_checkpoint(source, tmp_path / "out", form.config(), batches(), exporter="awq")
    assert not (tmp_path / "out").exists()
    assert "cannot hold this model" in str(refusal.value)


def test_compressed_tensors_holds_them_in_a_group_of_their_own(form: Form, source: Path, tmp_path: Path) -> None:
    scheme = "int8" if form.template == "gpt_oss" else form.scheme
    config = attrs.evolve(form, scheme=scheme).config()
    quantize_checkpoint(source, tmp_path / "out", config, batches(), exporter="compressed_tensors")
    assert_kept(form, source, tmp_path / "out")
    import_model_from_safetensors(None, tmp_path / "out", device="cpu")


def test_a_transform_that_would_change_them_is_refused_before_any_work(form: Form, source: Path, tmp_path: Path) -> None:
    config = form.config()
    config.algo_config = LLMTemplate.get("deepseek_v3").get_config("int4_wo_32", algorithm="smoothquant").algo_config
    with pytest.raises(ConfigError, match=r"'smoothquant' changes float weights.*keep_prequantized_layers=False"):
        quantize_checkpoint(source, tmp_path / "out", config, batches())


def test_what_has_no_exact_expression_is_dequantized_and_the_plan_says_so(tmp_path: Path) -> None:
    """FP8 with a method whose inputs are quantized by a bound that no spec has."""
    form = attrs.evolve(FORMS["DeepSeek"], block={"quant_method": "fbgemm_fp8"})
    planned = plan(made(form, tmp_path), form.config(), probing=False)
    assert planned.plan is not None
    assert not planned.plan.kept
    assert any("10 layer(s) are quantized in the source but written dequantized" in warning for warning in planned.plan.warnings)


def test_inputs_of_deepseek_v3_1_have_powers_of_two_as_scales(tmp_path: Path) -> None:
    form = attrs.evolve(FORMS["DeepSeek"], block=DEEPSEEK | {"scale_fmt": "ue8m0"})
    planned = quantize_checkpoint(made(form, tmp_path), tmp_path / "out", form.config(), batches())
    assert len(planned.kept) == form.kept
    model: Any = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    scale = torch.exp2((x.abs().amax(1, keepdim=True) / 448).log2().ceil())
    expected = (x / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(model.get_submodule(planned.kept[0]).input_quantizer(x), expected)


def test_fp8_modules_in_memory_are_a_source_too(tmp_path: Path) -> None:
    """Linear layers with codes and scales, as transformers has them where a device has kernels for them."""
    form = FORMS["DeepSeek"]
    model = form.model()
    stored: dict[str, Tensor] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            own = fp8(f"{name}.weight", module.weight.detach())
            stored |= own
            for leaf, tensor in own.items():
                setattr(module, leaf.removeprefix(f"{name}."), torch.nn.Parameter(tensor, requires_grad=False))
    model.config.quantization_config = form.block
    quantizer = ModelQuantizer(form.config())
    planned = quantizer.plan(model)
    assert isinstance(planned, QuantPlan)
    assert len(planned.kept) == form.kept
    quantized = quantizer.quantize_model(model)
    assert quantized.quark_plan.kept == planned.kept
    assert not hasattr(quantized.config, "quantization_config")
    export_safetensors(quantized, tmp_path / "out")
    result, codes = load_file(tmp_path / "out/model.safetensors"), stored_codes(stored)
    for name in planned.kept:
        assert all(torch.equal(*pair) for pair in zip(written_codes(result, name), codes[name], strict=True)), name
    values = codes["model.layers.0.mlp.up_proj"][0].view(torch.float8_e4m3fn).float()
    values *= codes["model.layers.0.mlp.up_proj"][1].repeat_interleave(128, 0).repeat_interleave(128, 1)
    rounded = quantized.get_submodule("model.layers.0.mlp.up_proj")
    assert torch.equal(rounded.weight, rounded.weight_quantizer.quantizer.round_to_nearest(values.to(DTYPE))[0])


def test_compressed_tensors_that_transformers_has_loaded_are_a_source_too(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers wants it to load the layout")
    quantize_checkpoint(tiny_model_dir(), tmp_path / "source", tiny_config("int4_wo_32"), exporter="compressed_tensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    loaded = stored_codes({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert loaded, "transformers has dequantized it: nothing is tested"
    config = attrs.evolve(tiny_config("ptpc_fp8"), exclude=["*self_attn*", "lm_head"])
    quantized: Any = ModelQuantizer(config).quantize_model(model)
    assert quantized.quark_plan.kept
    export_safetensors(quantized, tmp_path / "out")
    result = load_file(tmp_path / "out/model.safetensors")
    for name in quantized.quark_plan.kept:
        assert all(torch.equal(*pair) for pair in zip(written_codes(result, name), loaded[name], strict=True)), name
    assert result["model.layers.0.mlp.up_proj.weight"].dtype is torch.float8_e4m3fn


def codes_of_attention(directory: Path) -> bool:
    return "model.layers.0.self_attn.q_proj.weight_scale" in load_file(directory / "model.safetensors")


@pytest.mark.parametrize("keeps", [True, False])
def test_the_method_of_amd_quark_has_its_switch(keeps: bool, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_model_dir(), tmp_path / "source", tiny_config("int4_wo_32"), exporter="compressed_tensors")
    config = attrs.evolve(tiny_config("ptpc_fp8"), exclude=["*self_attn*", "lm_head"], keep_prequantized_layers=False)
    ModelQuantizer(config).direct_quantize_checkpoint(tmp_path / "source", tmp_path / "method", keeps)
    assert codes_of_attention(tmp_path / "method") == keeps


@pytest.mark.parametrize("post_rope", [True, False])
def test_their_outputs_may_enter_a_quantized_cache(post_rope: bool, tmp_path: Path) -> None:
    quantize_checkpoint(tiny_model_dir(), tmp_path / "source", tiny_config("int4_wo_32"), exporter="compressed_tensors")
    config = LLMTemplate.get("llama").get_config("ptpc_fp8", kv_cache_scheme="fp8", kv_cache_post_rope=post_rope)
    config.exclude = ["*self_attn*", "lm_head"]
    planned = quantize_checkpoint(tmp_path / "source", tmp_path / "out", config, batches())
    assert "model.layers.0.self_attn.k_proj" in planned.kept
    model: Any = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    assert [sorted(row.states) for row in model.quark_plan.attentions] == [sorted(row.states) for row in planned.attentions]
    stored, result = load_file(tmp_path / "source/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    for name, (codes, scale) in stored_codes(stored).items():
        if name in planned.kept:
            assert all(torch.equal(*pair) for pair in zip(written_codes(result, name), (codes, scale), strict=True)), name
