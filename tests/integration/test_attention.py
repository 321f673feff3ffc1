"""Quantized attention from configuration to checkpoint and back: probabilities, and rotated keys."""

import copy
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import CalibrationError, CheckpointError, ConfigError, UnsupportedError
from quark.models.hf.attention_switch import switch_attention
from quark.models.layers import QuantizerModule
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, held_out_text, tiny_model, tiny_model_dir
from quark_workbench.cli.main import main

IDS = torch.arange(40).reshape(2, 20)
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = SIZES | {"intermediate_size": 128, "num_key_value_heads": 2}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "gemma2": Gemma2Config(**GROUPED, head_dim=16, sliding_window=8),
    "phi3": Phi3Config(**GROUPED, pad_token_id=0),
    "opt": OPTConfig(**SIZES, ffn_dim=128, word_embed_proj_dim=64),
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=128),
    "gpt_oss": GptOssConfig(**GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
}
PROBABILITIES = {"attention_scheme": "fp8"}
KEYS = {"kv_cache_scheme": "fp8", "kv_cache_post_rope": True}
OPTIONS = {"probabilities": PROBABILITIES, "keys": KEYS, "both": PROBABILITIES | KEYS}
BLOCK = "model.layers.0.self_attn."


def asked(family: str = "llama", **options: Any) -> QConfig:
    return LLMTemplate.get(family).get_config(scheme="int4_wo_32", **options)


def small(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), dtype=dtype, **options)
    return model.eval()


def quantized(model: nn.Module | None = None, family: str = "llama", **options: Any) -> nn.Module:
    data = calibration_batches(2, 64) if model is None else [IDS]
    return ModelQuantizer(asked(family, **options)).quantize_model(tiny_model() if model is None else model, data)


def logits(model: nn.Module, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS, **inputs).logits
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_quantizers_our_eager_attention_is_that_of_transformers_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    model = small(family, dtype, attn_implementation="eager")
    padded = torch.ones_like(IDS)
    padded[1, :5] = 0
    expected = logits(model, attention_mask=padded)
    names = [n for n, m in model.named_modules() if n.endswith(("attn", "attention"))]
    switch_attention(model, names, eager=True)
    assert model.config._attn_implementation == "quark_eager"
    assert torch.equal(logits(model, attention_mask=padded), expected)


def test_without_quantizers_our_fused_attention_is_that_of_transformers_bit_for_bit() -> None:
    model = small("llama", attn_implementation="sdpa")
    expected = logits(model)
    switch_attention(model, [BLOCK[:-1]], eager=False)
    assert model.config._attn_implementation == "quark_sdpa"
    assert torch.equal(logits(model), expected)


def reloads(model: nn.Module, directory: Path) -> None:
    """Through our reader, built anew and into a float model, and through transformers."""
    export_safetensors(model, directory)
    expected = logits(model)
    assert torch.equal(logits(import_model_from_safetensors(None, directory)), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(directory, dtype="auto")), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bundled_model_reloads_to_the_same_logits(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized(tiny_model(dtype), **options)
    assert not torch.equal(logits(model), logits(quantized(tiny_model(dtype)))), "attention is quantized"
    reloads(model, tmp_path / "out")
    assert "quark_" not in (tmp_path / "out" / "config.json").read_text(), "the implementation is this process's affair"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "gpt_neox"])
def test_other_families_reload_to_the_same_logits(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    reloads(quantized(small(family), family, **options), tmp_path / "out")


@pytest.mark.parametrize("cache", ["fp8_per_head", "int8", "nvfp4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt_neox"])
def test_other_caches_reload_to_the_same_logits(family: str, cache: str, tmp_path: Path) -> None:
    model = quantized(small(family), family, kv_cache_scheme=cache)
    assert not torch.equal(logits(model), logits(quantized(small(family), family))), "the cache is quantized"
    reloads(model, tmp_path / "out")


LENGTHS = [[1, 5, 9, 2, 60, 3], [7, 7, 30]]


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_the_scale_of_a_head_is_its_largest_magnitude_over_all_tokens_by_the_largest_of_e4m3(family: str) -> None:
    """In the first block of a model with float weights, whose keys and values no rounding has changed."""
    batches = [torch.tensor([tokens]) for tokens in LENGTHS]
    config = asked(family, kv_cache_scheme="fp8_per_head")
    cached = {name: attrs.evolve(layer, weight=None) for name, layer in config.kv_cache_quant_config.items()}
    config = attrs.evolve(config, global_quant_config=QLayerConfig(), layer_quant_config={}, kv_cache_quant_config=cached)
    caches = [small(family)(tokens, use_cache=True).past_key_values.layers[0] for tokens in batches]
    attention: Any = ModelQuantizer(config).quantize_model(small(family), batches).get_submodule(BLOCK[:-1])
    for state, quantizer in (("keys", attention.key_quantizer), ("values", attention.value_quantizer)):
        tokens = torch.cat([getattr(layer, state)[0] for layer in caches], dim=1)
        assert torch.equal(quantizer.scale, tokens.abs().amax(dim=(1, 2)) / 448)
        values, scales = quantizer(tokens[None])[0], quantizer.scale[:, None, None]
        codes = (values / scales).to(torch.float8_e4m3fn).float()
        assert torch.equal(codes * scales, values), "values are on the grid of their head"
        assert codes.abs().amax(dim=(1, 2)).tolist() == [448.0] * len(codes)


def test_scales_of_heads_are_those_of_keys_and_of_values_alone_but_at_least_the_floor() -> None:
    config = attrs.evolve(asked(kv_cache_scheme="fp8_per_head"), min_kv_scale=0.0125)
    scales = {}
    for floor, settings in ((0.0, asked(kv_cache_scheme="fp8_per_head")), (0.0125, config)):
        attention: Any = ModelQuantizer(settings).quantize_model(tiny_model(), calibration_batches(2, 64)).get_submodule(BLOCK[:-1])
        scales[floor] = torch.stack([attention.key_quantizer.scale, attention.value_quantizer.scale])
    assert len(scales[0.0].unique()) == scales[0.0].numel()
    assert torch.equal(scales[0.0125], scales[0.0].clamp(min=0.0125))
    assert not torch.equal(scales[0.0125], scales[0.0])


def test_an_int8_cache_rounds_each_token_of_each_head_by_itself() -> None:
    attention: Any = quantized(small("llama"), kv_cache_scheme="int8").get_submodule(BLOCK[:-1])
    x = torch.randn(2, 2, 5, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 20).reshape(2, 2, 5, 1)
    rounded = attention.key_quantizer(x)
    for place in ((0, 0, 0), (1, 1, 4), (0, 1, 2)):
        alone = attention.key_quantizer(x[place].reshape(1, 1, 1, 16))
        assert torch.equal(rounded[place], alone.reshape(16)), "no other token or head has a part in it"
    assert float(((rounded - x).abs() / x.abs().amax(-1, keepdim=True)).amax()) <= 0.5 / 127 * (1 + 2**-20)


def test_an_nvfp4_cache_has_one_stored_scale_and_its_blocks_lie_in_one_head() -> None:
    attention: Any = quantized(small("llama"), kv_cache_scheme="nvfp4").get_submodule(BLOCK[:-1])
    assert attention.key_quantizer.scale.shape == ()
    x = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 1] *= 0.125
    assert torch.equal(attention.key_quantizer(x)[:, 0], attention.key_quantizer(other)[:, 0])


@pytest.mark.parametrize("cache", ["fp8_per_head", "int8", "nvfp4"])
def test_attention_that_cannot_be_reached_is_refused_by_name_before_any_work(cache: str) -> None:
    model: Any = small("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"(?s)the cache has several scales, but .*k_proj.*no axis of heads.*such as with fp8"):
        ModelQuantizer(asked(kv_cache_scheme=cache)).quantize_model(model, [IDS])
    assert isinstance(model.get_submodule(f"{BLOCK}k_proj"), nn.Linear)


@pytest.mark.parametrize("family", ["opt", "phi3"])
def test_probabilities_of_other_attention_reload_to_the_same_logits(family: str, tmp_path: Path) -> None:
    reloads(quantized(small(family), family, **PROBABILITIES), tmp_path / "out")


def test_a_switched_model_can_be_filled_from_an_export(tmp_path: Path) -> None:
    model = quantized(**OPTIONS["both"])
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(tiny_model(), tmp_path / "out")), logits(model))


def test_an_eager_model_stays_eager_when_only_keys_are_quantized(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = quantized(small("llama", attn_implementation="eager"), **KEYS)
    assert model.config._attn_implementation == "quark_eager"
    export_safetensors(model, tmp_path / "out")
    back = import_model_from_safetensors(None, tmp_path / "out", attn_implementation="eager")
    assert torch.equal(logits(back), logits(model))


def test_scales_have_the_names_that_runtimes_look_for(tmp_path: Path) -> None:
    export_safetensors(quantized(**OPTIONS["both"]), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    found = {n.removeprefix(BLOCK): t for n, t in tensors.items() if n.startswith(BLOCK) and "output" in n}
    assert set(found) == {f"{p}_proj.output_scale" for p in "qkv"} | {"prob_output_scale"}
    assert all(t.numel() == 1 for t in found.values())
    # The first token attends to itself alone, so the largest probability is 1, and FP8 E4M3 ends at 448.
    assert float(found["prob_output_scale"]) == pytest.approx(1 / 448, rel=2**-23)
    assert torch.equal(found["k_proj.output_scale"], found["v_proj.output_scale"]), "keys and values share the larger"
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["kv_cache_post_rope"] is True
    assert written["softmax_quant_spec"]["dtype"] == "fp8_e4m3"
    # vLLM sets the output quantization of queries aside only under this very key.
    assert "*q_proj" in written["layer_quant_config"]
    assert not any(name.endswith(".q_proj") for name in written["layer_quant_config"])


def test_queries_that_differ_are_written_under_their_own_names_and_reload(tmp_path: Path) -> None:
    model = quantized(**PROBABILITIES, layer_config={"*layers.0.self_attn.q_proj": "int4_wo_64"})
    reloads(model, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["layer_quant_config"]
    assert {f"model.layers.{i}.self_attn.q_proj" for i in range(3)} <= set(written)
    assert "*q_proj" not in written


def quantizer(model: nn.Module, name: str) -> QuantizerModule:
    found = model.get_submodule(name)
    assert isinstance(found, QuantizerModule)
    return found


def test_scales_of_keys_are_those_of_the_float_model_after_the_rotary_embedding() -> None:
    config = asked(**KEYS)
    config.separate_kv_scales = True
    data = calibration_batches(2, 64)
    model = ModelQuantizer(config).quantize_model(tiny_model(), data)
    assert model.get_submodule(BLOCK + "k_proj").output_quantizer is None, "it has moved to the attention module"
    plain = tiny_model()
    with torch.no_grad():
        caches = [plain(batch, use_cache=True).past_key_values for batch in data]
    for i in range(config_layers(plain)):
        # The float model's cache holds exactly these keys.
        largest = max(float(cache.layers[i].keys.abs().max()) for cache in caches)
        name = f"model.layers.{i}.self_attn."
        assert float(quantizer(model, name + "key_quantizer").scale) == pytest.approx(largest / 448, rel=1e-5)  # type: ignore[arg-type]
        largest = max(float(cache.layers[i].values.abs().max()) for cache in caches)
        assert float(quantizer(model, name + "value_quantizer").scale) == pytest.approx(largest / 448, rel=1e-5)  # type: ignore[arg-type]


def config_layers(model: nn.Module) -> int:
    return int(model.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]


def test_calibration_runs_each_sample_once() -> None:
    model, data, entered = tiny_model(), calibration_batches(3, 16), []
    model.get_submodule("model.layers.0").register_forward_hook(lambda *_: entered.append(1))
    ModelQuantizer(asked(**OPTIONS["both"])).quantize_model(model, data)
    assert len(entered) == 3


def test_no_observer_is_left_behind() -> None:
    model = quantized(**PROBABILITIES)
    attention = model.get_submodule(BLOCK[:-1])
    assert isinstance(attention.prob_output_quantizer, QuantizerModule)
    assert not {"prob_output_quantizer", "query_quantizer", "states_in_calibration"} & set(vars(attention))


def test_dynamic_probabilities_need_no_data_and_reload(tmp_path: Path) -> None:
    config = asked(**PROBABILITIES)
    assert config.softmax_quant_spec is not None
    config.softmax_quant_spec = attrs.evolve(config.softmax_quant_spec, is_dynamic=True)
    config.layer_quant_config = {}
    model = ModelQuantizer(config).quantize_model(tiny_model())
    export_safetensors(model, tmp_path / "out")
    assert not any("prob_output" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_generation_with_a_cache_gives_the_tokens_of_generation_without(options: dict[str, Any]) -> None:
    model = quantized(**options)
    prompt = calibration_batches(1, 16)[0]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    cached, plain = (model.generate(prompt, use_cache=use, **settings) for use in (True, False))  # type: ignore[operator]
    assert cached.shape == (1, 24)
    assert torch.equal(cached, plain)


def test_an_export_without_scales_of_probabilities_leaves_them_float(tmp_path: Path) -> None:
    """Models that were not run in eager mode are exported so elsewhere."""
    model = quantized(**PROBABILITIES)
    export_safetensors(model, tmp_path / "out")
    drop(tmp_path / "out", lambda name: "prob_output" in name)
    back = import_model_from_safetensors(None, tmp_path / "out", attn_implementation="eager")
    for i in range(config_layers(model)):
        model.get_submodule(f"model.layers.{i}.self_attn").prob_output_quantizer = None  # type: ignore[assignment]
    assert back.config._attn_implementation == "quark_eager", "queries are quantized there all the same"
    assert torch.equal(logits(back), logits(model))


def test_an_export_that_lacks_some_scales_of_attention_is_refused(tmp_path: Path) -> None:
    export_safetensors(quantized(**PROBABILITIES), tmp_path / "out")
    drop(tmp_path / "out", lambda name: name == BLOCK + "prob_output_scale")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor.*layers\.0\.self_attn\.prob_output_quantizer\.scale"):
        import_model_from_safetensors(None, tmp_path / "out")


def drop(directory: Path, unwanted: Any) -> None:
    file = directory / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if not unwanted(n)}, file, {"format": "pt"})


def test_attention_that_calibration_does_not_reach_is_named() -> None:
    model = tiny_model()
    model.get_submodule("model.layers.0").forward = lambda hidden, *_, **__: hidden  # type: ignore[method-assign]
    with pytest.raises(CalibrationError, match="no calibration batch reached"):
        ModelQuantizer(asked(**PROBABILITIES)).quantize_model(model, calibration_batches(1, 8))


class Bare(nn.Module):
    """Attention outside transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"q_proj": nn.Linear(32, 32)})


def test_a_model_outside_transformers_is_refused_before_any_work() -> None:
    model = Bare()
    config = asked(**PROBABILITIES)
    config.exclude, config.layer_quant_config = [], {}
    with pytest.raises(UnsupportedError, match="attention of a Bare cannot be quantized: only the attention of transformers models"):
        ModelQuantizer(config).quantize_model(model)
    assert type(model.attn["q_proj"]) is nn.Linear


def test_another_implementation_of_attention_is_refused_with_the_cure() -> None:
    model = tiny_model()
    model.config._attn_implementation_internal = "flex_attention"  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match=r"'flex_attention'.*set_attn_implementation"):
        ModelQuantizer(asked(**PROBABILITIES)).quantize_model(model, [IDS])


@pytest.mark.parametrize("separate", [False, True])
def test_scales_of_a_fused_projection_are_of_the_keys_and_values_that_are_cached(separate: bool, tmp_path: Path) -> None:
    """Under the names that vLLM and SGLang read: they know no scale of ``qkv_proj``'s output."""
    config = asked("phi3", kv_cache_scheme="fp8")
    config.separate_kv_scales = separate
    float_model = small("phi3")
    with torch.no_grad():
        cache = float_model(IDS, use_cache=True).past_key_values
    export_safetensors(ModelQuantizer(config).quantize_model(float_model, [IDS]), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in stored if "output" in name]
    for i in range(config_layers(float_model)):
        largest = [float(x.abs().max()) / 448 for x in (cache.layers[i].keys, cache.layers[i].values)]
        found = [float(stored[f"model.layers.{i}.self_attn.{name}_scale"]) for name in "kv"]
        assert found == pytest.approx(largest if separate else [max(largest)] * 2, rel=1e-5)


def test_a_fused_projection_as_amd_quark_rounds_it_reloads(tmp_path: Path) -> None:
    model = quantized(small("phi3"), "phi3", kv_cache_scheme="fp8", kv_cache_post_rope=False)
    reloads(model, tmp_path / "out")
    assert BLOCK + "qkv_proj.output_scale" in load_file(tmp_path / "out" / "model.safetensors")


def test_the_command_line_quantizes_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text(held_out_text()[:4000])
    options = ["--attention-scheme", "fp8", "--kv-cache", "fp8", "--kv-cache-post-rope", "--num-calib", "2", "--seq-len", "32"]
    arguments = ["quantize", str(tiny_model_dir()), str(tmp_path / "out"), "--scheme", "int4_wo_64", "--calib", str(text), *options]
    monkeypatch.setattr("sys.argv", ["quark", *arguments])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["kv_cache_post_rope"] is True
    assert BLOCK + "prob_output_scale" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("options", [PROBABILITIES, KEYS], ids=["probabilities", "keys"])
def test_a_model_that_was_read_back_is_exported_to_the_same_bytes(options: dict[str, Any], tmp_path: Path) -> None:
    model = ModelQuantizer(asked(**options)).quantize_model(tiny_model(), calibration_batches()[:1])
    export_safetensors(model, tmp_path / "first")
    export_safetensors(import_model_from_safetensors(tiny_model(), tmp_path / "first"), tmp_path / "second")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
