"""From memory to disk and back: the same logits through our reader and through transformers."""

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, MixtralConfig, MixtralForCausalLM, OPTConfig, Phi3Config, Qwen3Config

import quark
from quark.checkpoint.export import export_with
from quark.checkpoint.exporter import ExportOptions
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import CheckpointError, ConfigError, OutputError, UnknownNameError
from quark.plugins import Catalog, using
from quark.plugins.discovery import discover
from quark.torch import LLMTemplate, ModelExporter, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_amd.export_config import ExporterConfig, JsonExporterConfig
from quark_tiny_model import calibration_batches, tiny_model, tiny_model_dir, tiny_tokenizer

IDS = torch.arange(40).reshape(2, 20)


def quantized(scheme: str, dtype: torch.dtype = torch.float32, blocks: int | None = None, **options: Any) -> nn.Module:
    config = LLMTemplate.get("llama").get_config(scheme=scheme, **options)
    return ModelQuantizer(config).quantize_model(tiny_model(dtype, blocks), calibration_batches(2, 64))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_every_scheme_reloads_to_the_same_logits_in_our_reader_and_in_transformers(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized(scheme, dtype, blocks=1, kv_cache_scheme="fp8")
    export_safetensors(model, tmp_path / "out")
    expected = logits(model)
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), expected)
    assert torch.equal(logits(import_model_from_safetensors(tiny_model(dtype, blocks=1), tmp_path / "out")), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")), expected)


@pytest.mark.parametrize("order", ["order", "reorder"])
def test_both_orders_of_four_bit_codes_reload(order: str, tmp_path: Path) -> None:
    model = quantized("uint4_wo_32")
    export_safetensors(model, tmp_path / "out", pack_method=order)
    assert config_of(tmp_path / "out")["export"]["pack_method"] == order
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
MLP = {"intermediate_size": 128, "num_key_value_heads": 2}
FAMILIES = {
    "opt": OPTConfig(**SIZES, ffn_dim=128, word_embed_proj_dim=64),
    "gemma2": Gemma2Config(**SIZES, **MLP, head_dim=16),
    "phi3": Phi3Config(**SIZES, **MLP, pad_token_id=0),
    "qwen3": Qwen3Config(**SIZES, **MLP, head_dim=16),
}


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reloads(family: str, scheme: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    config = LLMTemplate.get(family).get_config(scheme=scheme, kv_cache_scheme="fp8")
    ModelQuantizer(config).quantize_model(model, [IDS[:1]])
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_mixed_schemes_reload_whatever_the_order_of_patterns(tmp_path: Path) -> None:
    """JSON sorts keys, so patterns would come back in another order: what is written are exact names."""
    layers = {"*self_attn*": "int4_wo_64", "*v_proj": "ptpc_fp8", "*layers.0.mlp*": "mxfp4"}
    model = quantized("uint4_wo_128", layer_config=layers, exclude_layers=["lm_head", "*layers.1.mlp.down_proj"], kv_cache_scheme="fp8")
    export_safetensors(model, tmp_path / "out")
    assert not any("*" in key for key in (*config_of(tmp_path / "out")["layer_quant_config"], *config_of(tmp_path / "out")["exclude"]))
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_a_tied_head_that_was_quantized_is_written_apart(tmp_path: Path) -> None:
    model = quantized("int4_wo_64", exclude_layers=[])
    export_safetensors(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))


@pytest.mark.parametrize("exclude", [["lm_head"], []], ids=["float head", "quantized head"])
def test_embeddings_that_a_type_names_reload_quantized(exclude: list[str], tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", exclude_layers=exclude)
    config.layer_type_quant_config = {nn.Embedding: config.global_quant_config}
    model = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(1, 64))
    export_safetensors(model, tmp_path / "out")
    back = import_model_from_safetensors(None, tmp_path / "out")
    assert type(back.model.embed_tokens).__name__ == "QuantEmbedding"
    assert torch.equal(logits(back), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_excluded_attention_with_a_quantized_cache_reloads(tmp_path: Path) -> None:
    model = quantized("int4_wo_64", exclude_layers=["lm_head", "*self_attn*"], kv_cache_scheme="fp8")
    export_safetensors(model, tmp_path / "out")
    found = config_of(tmp_path / "out")
    assert set(found["export"]["kv_cache_group"]) <= set(found["layer_quant_config"]), "vLLM looks for them there"
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("scheme", ["uint4_wo_64", "fp8"])
def test_what_was_read_back_is_exported_to_the_same_bytes(scheme: str, tmp_path: Path) -> None:
    export_safetensors(quantized(scheme, torch.bfloat16, kv_cache_scheme="fp8"), tmp_path / "first")
    export_safetensors(import_model_from_safetensors(None, tmp_path / "first"), tmp_path / "second")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_tied_head_that_stays_float_is_written_once(tmp_path: Path) -> None:
    export_safetensors(quantized("int4_wo_64"), tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert config_of(tmp_path / "out")["exclude"] == ["lm_head"]


def test_the_config_has_no_null_where_readers_want_lists_and_dicts_and_five_export_keys(tmp_path: Path) -> None:
    export_safetensors(quantized("fp8", kv_cache_scheme="fp8", min_kv_scale=0.01), tmp_path / "out")
    found = config_of(tmp_path / "out")
    assert all(isinstance(found[k], dict) for k in ("layer_quant_config", "layer_type_quant_config", "kv_cache_quant_config"))
    assert isinstance(found["exclude"], list)
    assert sorted(found["export"]) == ["kv_cache_group", "min_kv_scale", "pack_method", "weight_format", "weight_merge_groups"]
    names = [f"model.layers.{i}.self_attn.{p}" for i in range(3) for p in ("k_proj", "v_proj")]
    assert found["export"]["kv_cache_group"] == sorted(found["kv_cache_quant_config"]) == sorted(names)
    keys = {frozenset(layer) for layer in found["layer_quant_config"].values()} | {frozenset(found["global_quant_config"])}
    assert len(keys) == 1, "vLLM compares key sets of fused shards"


def test_scales_are_float32_in_a_16_bit_model(tmp_path: Path) -> None:
    export_safetensors(quantized("ptpc_fp8", torch.bfloat16), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float32
    assert tensors["model.norm.weight"].dtype == torch.bfloat16


def test_keys_and_values_share_the_larger_scale_unless_they_are_to_be_separate(tmp_path: Path) -> None:
    from dataclasses import replace

    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", kv_cache_scheme="fp8")
    found = {}
    for separate in (False, True):
        model = ModelQuantizer(replace(config, separate_kv_scales=separate)).quantize_model(tiny_model(), calibration_batches(2, 64))
        export_safetensors(model, tmp_path / str(separate))
        tensors = load_file(tmp_path / str(separate) / "model.safetensors")
        found[separate] = [float(tensors[f"model.layers.0.self_attn.{p}.output_scale"]) for p in ("k_proj", "v_proj")]
        assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / str(separate))), logits(model))
    assert found[False][0] == found[False][1] == max(found[True])
    assert found[True][0] != found[True][1]


def test_the_plan_of_what_was_read_back_names_the_attention_modules_with_quantized_states(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("fp8", attention_scheme="fp8")
    model: Any = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(2, 16))
    export_safetensors(model, tmp_path / "out")
    read: Any = import_model_from_safetensors(None, tmp_path / "out")
    assert [row.name for row in read.quark_plan.attentions] == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert read.quark_plan.attentions == model.quark_plan.attentions


def cache_scales(directory: Path) -> dict[str, float]:
    tensors = load_file(directory / "model.safetensors")
    return {name: float(tensor) for name, tensor in tensors.items() if name.endswith(("k_proj.output_scale", "v_proj.output_scale"))}


def test_no_cache_scale_is_below_the_floor_of_the_configuration_and_the_export_says_which_that_is(tmp_path: Path) -> None:
    export_safetensors(quantized("fp8", kv_cache_scheme="fp8"), tmp_path / "plain")
    plain = cache_scales(tmp_path / "plain")
    assert config_of(tmp_path / "plain")["export"]["min_kv_scale"] == 0
    # A floor in the middle, exact in float32: some scales are raised to it, and the others stay.
    floor = float(torch.tensor(sorted(plain.values())[len(plain) // 2]) * 1.0625)
    assert min(plain.values()) < floor < max(plain.values())
    model = quantized("fp8", kv_cache_scheme="fp8", min_kv_scale=floor)
    export_safetensors(model, tmp_path / "floored")
    assert cache_scales(tmp_path / "floored") == {name: max(scale, floor) for name, scale in plain.items()}
    assert config_of(tmp_path / "floored")["export"]["min_kv_scale"] == floor
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "floored")), logits(model))


def test_an_export_may_merge_separate_cache_scales_to_the_larger_and_have_a_floor_of_its_own(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", kv_cache_scheme="fp8")
    config.separate_kv_scales = True
    model = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(2, 64))
    found = {}
    for name, group, floor in (("apart", [], 0.0), ("merged", ["*k_proj", "*v_proj"], 0.0), ("floored", ["*k_proj", "*v_proj"], 1.0)):
        options = JsonExporterConfig(kv_cache_group=group, min_kv_scale=floor)
        ModelExporter(ExporterConfig(json_export_config=options), tmp_path / name).export_safetensors_model(model)
        found[name] = cache_scales(tmp_path / name)
        assert config_of(tmp_path / name)["export"]["min_kv_scale"] == floor
    for block in range(3):
        names = [f"model.layers.{block}.self_attn.{projection}.output_scale" for projection in ("k_proj", "v_proj")]
        apart = [found["apart"][name] for name in names]
        assert apart[0] != apart[1]
        assert [found["merged"][name] for name in names] == [max(apart)] * 2
        assert [found["floored"][name] for name in names] == [max(1.0, *apart)] * 2
    assert len(found["merged"]) == 6


@pytest.mark.parametrize("scheme", ["int4_wo_64", "int8", "int4_fp8"])
def test_zero_points_of_symmetric_schemes_can_be_left_out(scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme)
    export_with("safetensors", model, tmp_path / "out", ExportOptions(zero_points=False))
    assert not any("zero_point" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    back = import_model_from_safetensors(None, tmp_path / "out")
    assert torch.equal(logits(back), logits(model))


def test_the_older_exporter_class_packs_in_the_order_of_its_config(tmp_path: Path) -> None:
    model = quantized("uint4_wo_32")
    config = ExporterConfig(json_export_config=JsonExporterConfig(pack_method="order"))
    ModelExporter(config, tmp_path / "older").export_safetensors_model(model)
    export_safetensors(model, tmp_path / "out", pack_method="order")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "older" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_a_tokenizer_that_is_given_is_written_and_not_the_one_beside_the_model(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<of the caller>"])
    ModelExporter(tmp_path / "out").export_safetensors_model(quantized("int4_wo_64"), tokenizer=tokenizer)
    assert "<of the caller>" in (tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8")


def test_routers_that_are_no_linear_layers_are_among_what_readers_leave_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=2)).eval()
    routers = [name for name, module in model.named_modules() if name.endswith(".gate") and not isinstance(module, nn.Linear)]
    assert len(routers) == 2
    export_safetensors(ModelQuantizer(LLMTemplate.get("mixtral").get_config(scheme="int4_wo_32")).quantize_model(model), tmp_path / "out")
    assert set(config_of(tmp_path / "out")["exclude"]) == {"lm_head", *routers}


def test_the_config_says_the_dtype_that_the_tensors_have(tmp_path: Path) -> None:
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_64")).quantize_model(tiny_model(torch.bfloat16).half())
    export_safetensors(model, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == torch.float16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


def test_a_model_that_was_in_training_is_read_back_in_evaluation_mode(tmp_path: Path) -> None:
    export_safetensors(quantized("int4_wo_64"), tmp_path / "out")
    back = import_model_from_safetensors(tiny_model().train(), tmp_path / "out")
    assert not any(m.training for m in back.modules())


def test_shards_are_written_and_read(tmp_path: Path) -> None:
    model = quantized("int8")
    export_with("safetensors", model, tmp_path / "out", ExportOptions(max_shard_bytes=500_000))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))


def test_tokenizer_and_generation_config_travel_with_the_export(tmp_path: Path) -> None:
    export_safetensors(quantized("int4_wo_64"), tmp_path / "out")
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }


def test_the_older_exporter_class_takes_a_path_or_a_config_and_saves_the_tokenizer(tmp_path: Path) -> None:
    model = quantized("int4_wo_64")
    ModelExporter(str(tmp_path / "first")).export_safetensors_model(model, quant_config=model.quant_config, tokenizer=tiny_tokenizer())
    ModelExporter(export_dir=tmp_path / "second").export_quark_model(model)
    assert (tmp_path / "first" / "tokenizer.json").is_file()
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "second")), logits(model))


def test_quantizing_does_not_touch_the_checkpoint_it_was_loaded_from() -> None:
    path = tiny_model_dir() / "model.safetensors"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    quantized("int4_wo_64", torch.bfloat16)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_a_model_without_a_transformers_config_is_read_back_into_a_float_one(tmp_path: Path) -> None:
    layer = LLMTemplate.get("llama").get_config(scheme="int8").global_quant_config
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    model = ModelQuantizer(QConfig(layer)).quantize_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), [x])
    export_safetensors(model, tmp_path / "out")
    back = import_model_from_safetensors(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), tmp_path / "out")
    assert torch.equal(back(x), model(x))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        import_model_from_safetensors(None, tmp_path / "out")


def test_a_float_model_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has not been quantized"):
        export_safetensors(tiny_model(), tmp_path / "out")


def test_no_space_left_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = quantized("int4_wo_64")
    monkeypatch.setattr("quark.checkpoint.shard_writer.write_at", full)
    with pytest.raises(OutputError, match="no space left"):
        export_safetensors(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_exporter_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="safetensors"):
        export_safetensors(quantized("int4_wo_64"), tmp_path / "out", custom_mode="safetensor")


@pytest.mark.parametrize("export", ["onnx", "awq"])
def test_formats_of_plugins_that_are_not_installed_say_what_to_install(export: str, tmp_path: Path) -> None:
    exporter, model = ModelExporter(tmp_path / "out"), quantized("int4_wo_64")
    calls = {
        "onnx": lambda: exporter.export_onnx_model(model, IDS),
        "awq": lambda: exporter.export_safetensors_model(model, custom_mode="awq"),
    }
    others = tuple(candidate for candidate in discover() if candidate.source.distribution != "quark-exporters")
    with using(Catalog(others)), pytest.raises(UnknownNameError, match=f"Install a distribution that registers '{export}'"):
        calls[export]()
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, _: Any) -> None:
            raise RuntimeError("no")

    with pytest.raises(OutputError, match=r"the tokenizer, a Broken, cannot be saved \(RuntimeError: no\)"):
        ModelExporter(tmp_path / "out").export_safetensors_model(quantized("int4_wo_64"), tokenizer=Broken())
    assert list(tmp_path.iterdir()) == []


BLOCK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": (128, 128), "symmetric": True, "is_dynamic": False}
DIALECTS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "block fp8": (BLOCK_FP8, {"dtype": "fp8_e4m3", "group_size": 128, "symmetric": True}),
    "block fp8 with e8m0 scales": (
        {**BLOCK_FP8, "scale_type": "float8_e8m0fnu"},
        {"dtype": "fp8_e4m3", "group_size": 128, "symmetric": True, "scale_type": "float8_e8m0fnu"},
    ),
    "mxfp8": (
        {"dtype": "fp8_e4m3", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "scale_format": "e8m0", "is_dynamic": False},
        {"dtype": "fp8_e4m3", "group_size": 32, "scale_format": "e8m0"},
    ),
}
"""Specs that no named scheme has and that runtimes read."""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_specs_beyond_the_named_schemes_reload(dialect: str, tmp_path: Path) -> None:
    weight, activation = DIALECTS[dialect]
    layer = QLayerConfig(
        weight=QTensorConfig(**weight), input_tensors=QTensorConfig(qscheme="per_group", ch_axis=-1, is_dynamic=True, **activation)
    )
    config = QConfig(global_quant_config=layer, exclude=["lm_head"])
    model = ModelQuantizer(config).quantize_model(tiny_model(torch.bfloat16))
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")), logits(model))
