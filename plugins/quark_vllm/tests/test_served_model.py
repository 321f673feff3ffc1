"""A served model has the layers of a checkpoint by the names of a runtime, which fuses some of them."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import quark_vllm
from quark.config.model import QConfig
from quark.errors import UnsupportedError
from quark.models.layers import QuantizerModule
from quark.models.layers.layers_from_codes import Packed
from quark.plugins import schemes
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_tiny_model import calibration_batches, tiny_model
from quark_vllm.operator import Operation, announce, call
from quark_vllm.parts import cut_layer
from quark_vllm.served_model import CachedStates, ServedModel

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def config(**changes: str) -> QConfig:
    return LLMTemplate.get("llama").get_config(scheme="int8", kv_cache_scheme="fp8", **changes)


def served(where: Path, quant_config: QConfig) -> ServedModel:
    export_safetensors(ModelQuantizer(quant_config).quantize_model(tiny_model(), calibration_batches(1, 64)), where)
    return ServedModel(where, keeps_codes=False, fused=FUSED)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    quant_config = config()
    quant_config.exclude = ["lm_head", "*layers.0.self_attn.q_proj", "*layers.1.mlp.*"]
    return served(tmp_path_factory.mktemp("plain") / "out", quant_config)


def test_vllm_is_imported_by_nothing_but_what_vllm_calls() -> None:
    assert quark_vllm.register.__module__ == "quark_vllm"
    assert "vllm" not in sys.modules


def test_a_fused_layer_has_its_parts_in_order_float_ones_too(plain: ServedModel) -> None:
    parts = plain.parts("model.layers.0.self_attn.qkv_proj")
    assert [name.rpartition(".")[2] for name in parts] == FUSED["qkv_proj"]
    assert [isinstance(part, Packed) for part in parts.values()] == [False, True, True]
    assert list(plain.parts("model.layers.2.mlp.down_proj")) == ["model.layers.2.mlp.down_proj"]


@pytest.mark.parametrize("name", ["model.layers.1.mlp.gate_up_proj", "lm_head", "model.layers.0.mlp.strange_proj"])
def test_what_is_float_or_unknown_is_left_to_the_runtime(name: str, plain: ServedModel) -> None:
    assert plain.parts(name) == {}
    assert plain.experts(name) is None


def test_a_runtime_may_have_other_names(plain: ServedModel) -> None:
    renamed = ServedModel(plain.directory, False, lambda name: name.replace("model.", "language_model.model."), FUSED)
    assert list(renamed.parts("language_model.model.layers.2.mlp.down_proj")) == ["language_model.model.layers.2.mlp.down_proj"]
    assert set(renamed.stored["language_model.model.layers.2.mlp.down_proj"]) >= {"weight", "weight_scale", "input_scale"}
    assert list(renamed.unread()) == [], "stored tensors keep their names"
    assert renamed.name_of(renamed.embedding) == "language_model.model.embed_tokens"


def test_it_goes_to_other_processes_before_the_checkpoint_is_read(plain: ServedModel) -> None:
    again = pickle.loads(pickle.dumps(ServedModel(plain.directory, True)))
    assert (again.directory, again.keeps_codes) == (plain.directory, True)
    assert list(again.parts("model.layers.2.mlp.down_proj"))


def test_matrices_of_rotations_have_no_place_in_a_runtime_and_rotate_inputs(tmp_path: Path, plain: ServedModel) -> None:
    quant_config = config(algorithm="rotation")
    (rotation,) = quant_config.algo_config or ()
    rotation.r4, rotation.r3, rotation.preset = True, True, "reference"  # type: ignore[attr-defined]
    model = served(tmp_path / "out", quant_config)
    assert list(model.unread()) == ["shared_input_rotation_384"]
    assert list(ServedModel(model.directory, False, "vllm.{}".format).unread()) == ["shared_input_rotation_384"]
    assert list(plain.unread()) == []
    (layer,) = model.parts("model.layers.0.mlp.down_proj").values()
    assert isinstance(layer, Packed)
    assert len(layer.unpack()._forward_pre_hooks) == 1
    states = model.states("model.layers.0.self_attn")
    assert states is not None
    assert states.basis is not None
    keys = torch.randn(5, 2 * 64)
    expected = states.key(states.basis(keys.view(5, 2, 64).transpose(0, 1)[None]))[0].transpose(0, 1).reshape(5, -1)
    assert torch.equal(states.changed(keys, 2, "key"), expected)
    assert torch.equal(states.changed(keys.view(5, 2, 64), 2, "key").flatten(1), expected)
    assert model.states("model.layers.0.mlp") is None


def test_tensors_of_branches_have_no_place_in_a_runtime_and_come_with_the_layers(tmp_path: Path) -> None:
    model = served(tmp_path / "out", config(algorithm="lqer"))
    branches = [name for name in model._tensors if ".branch." in name]
    assert branches
    assert list(model.unread()) == branches
    (layer,) = model.parts("model.layers.0.mlp.down_proj").values()
    assert isinstance(layer, Packed)
    quantized: Any = layer.unpack()
    options: Any = {"keeps_codes": False, "dtype": torch.float32, "device": torch.device("cpu")}
    part = cut_layer(layer, slice(0, 8), slice(0, quantized.in_features), **options)
    x = torch.randn(3, quantized.in_features)
    with torch.no_grad():
        assert quantized.branch(x).abs().max() > 0
        torch.testing.assert_close(part(x), quantized(x)[:, :8])


def test_values_are_not_rotated() -> None:
    states = CachedStates(lambda x: -x, None, None, torch.round)
    values = torch.randn(3, 4)
    assert torch.equal(states.changed(values, 2, "value"), values.round())
    assert torch.equal(states.changed(values, 2, "query"), -values)


def test_quantized_probabilities_are_refused(tmp_path: Path) -> None:
    model = served(tmp_path / "out", LLMTemplate.get("llama").get_config("fp8", attention_scheme="fp8"))
    with pytest.raises(UnsupportedError, match="quantizes attention probabilities"):
        model.parts("model.layers.0.mlp.down_proj")


def test_a_compiled_model_calls_a_layer_and_traces_nothing_of_it() -> None:
    calls = []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(x.shape))
        return torch.cat([x, x], -1)

    operation = Operation(double, 8, torch.float32)
    announce("a layer", operation)
    compiled = torch.compile(lambda x: call("a layer", x + 1), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3, 4)), torch.full((3, 8), 2.0))
    assert calls == [(3, 4)]
    lookup = Operation(lambda ids: torch.ones(*ids.shape, 5), 5, torch.float32, adds_axis=True)
    announce("a look-up", lookup)
    assert torch.compile(lambda x: call("a look-up", x), backend="eager", fullgraph=True)(torch.zeros(2, 3).long()).shape == (2, 3, 5)


def of_heads(cache: str) -> CachedStates:
    """A cache with the scales of four heads, or dynamic ones."""
    spec: Any = schemes().load_kv_cache(cache)()
    quantizers = [QuantizerModule(spec, activation=True) for _ in range(2)]
    for quantizer in quantizers:
        if quantizer.is_static:
            observer = quantizer.quantizer.observer()
            observer.observe(torch.arange(1.0, 65).reshape(1, 4, 1, 16))
            quantizer.set_qparams(quantizer.quantizer.qparams_from(observer))
    return CachedStates(None, None, *quantizers)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_each_rank_has_the_scales_of_its_own_heads(ranks: int, heads: int) -> None:
    whole = of_heads("fp8_per_head")
    x = torch.linspace(-64, 64, 3 * 64).reshape(3, 64)
    expected = whole.changed(x, 4, "key")
    for rank in range(ranks):
        first = rank * 4 // ranks * 16
        own = whole.of_rank(rank, ranks)
        assert own.key.scale.shape == own.value.scale.shape == (heads,)
        part = slice(first, first + heads * 16)
        assert torch.equal(own.changed(x[:, part], heads, "key"), expected[:, part])


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
@pytest.mark.parametrize("cache", ["fp8", "fp8_per_head", "int8", "nvfp4"])
def test_a_float_cache_of_vllm_leaves_the_rounding_to_quark(cache: str, dtype: str) -> None:
    assert not of_heads(cache).rounded_by(dtype)


@pytest.mark.parametrize("cache", ["fp8", "fp8_per_head", "int8", "nvfp4"])
@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head"])
def test_a_cache_that_vllm_rounds_otherwise_is_refused(cache: str, dtype: str) -> None:
    if (cache, dtype) in {("fp8", "fp8"), ("fp8", "fp8_e4m3"), ("int8", "int8_per_token_head")}:
        assert of_heads(cache).rounded_by(dtype)
        return
    with pytest.raises(UnsupportedError, match=f"--kv-cache-dtype {dtype}, so vLLM would round the cache a second time"):
        of_heads(cache).rounded_by(dtype)


def test_scales_of_the_cache_are_known_by_the_layers_that_feed_it(plain: ServedModel) -> None:
    keys = "model.layers.0.self_attn.k_proj"
    assert list(plain.output_scales({keys, "model.layers.0.mlp.up_proj"})) == [f"{keys}.output_scale"]
