"""ModelQuantizer on tiny models: what changes, what stays, what is refused before anything changes."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import CalibrationError, ConfigError, NonFiniteError
from quark.models.layers import QuantConv2d, QuantConvTranspose2d, QuantEmbedding, QuantEmbeddingBag, QuantLinear, is_quantized
from quark.torch import LLMTemplate, ModelQuantizer


def scheme(name: str) -> QLayerConfig:
    return LLMTemplate.get("llama").get_config(scheme=name).global_quant_config


def llama(tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def tokens(*lengths: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (1, n), generator=g) for n in lengths]


def amax_of_inputs(model: nn.Module, name: str, data: list[torch.Tensor]) -> float:
    seen: list[float] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda m, a: seen.append(float(a[0].abs().max())))
    with torch.no_grad():
        for ids in data:
            model(ids)
    hook.remove()
    return max(seen)


@pytest.mark.parametrize("name", ["int4_wo_32", "uint4_wo_64", "int4_wo_per_channel", "int8", "fp8", "ptpc_fp8", "mxfp4", "int4_wa_64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scheme_quantizes_every_projection_and_the_model_still_runs(name: str, dtype: torch.dtype) -> None:
    model, data = llama(dtype=dtype), tokens(8, 13)
    reference = llama(dtype=dtype)
    quantized = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=name)).quantize_model(model, data)
    assert quantized is model
    assert sum(isinstance(m, QuantLinear) for m in model.modules()) == 14
    assert not is_quantized(model.lm_head)
    with torch.no_grad():
        ours, floats = model(data[0]).logits.float(), reference(data[0]).logits.float()
    assert ours.dtype == torch.float32
    assert torch.isfinite(ours).all()
    assert not torch.equal(ours, floats)
    assert (ours - floats).norm() < 0.6 * floats.norm()


def test_static_scales_are_the_range_of_the_float_model_over_all_samples_of_all_lengths() -> None:
    data = tokens(5, 9, 17)
    expected = amax_of_inputs(llama(), "model.layers.1.mlp.down_proj", data)
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="fp8")).quantize_model(llama(), data)
    scale = model.model.layers[1].mlp.down_proj.input_quantizer.scale
    assert scale.item() == torch.tensor(expected).div(448).item()


def test_padding_masks_belong_to_their_own_sample() -> None:
    ids = tokens(8, 8)
    batches = [{"input_ids": x, "attention_mask": torch.tensor([[0] * n + [1] * (8 - n)])} for x, n in zip(ids, (0, 3), strict=True)]
    expected = amax_of_inputs(llama(), "model.layers.1.mlp.down_proj", [ids[0], ids[1][:, 3:]])
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="fp8")).quantize_model(llama(), batches)
    assert model.model.layers[1].mlp.down_proj.input_quantizer.scale.item() == torch.tensor(expected).div(448).item()


def test_one_calibration_forward_passes_each_block_once() -> None:
    model, passes = llama(), []
    for i, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda m, a, i=i: passes.append(i))
    ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int8")).quantize_model(model, tokens(4, 5, 6))
    assert passes == [0, 0, 0, 1, 1, 1]


def test_weight_only_and_dynamic_schemes_run_no_forward() -> None:
    model = llama()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="mxfp4")).quantize_model(model, tokens(4))


def test_the_cache_scheme_quantizes_the_outputs_of_keys_and_values_alone() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", kv_cache_scheme="fp8", kv_cache_post_rope=False)
    model = ModelQuantizer(config).quantize_model(llama(), tokens(8))
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.output_quantizer.scale.shape == ()
    assert attention.v_proj.output_quantizer is not None
    assert attention.q_proj.output_quantizer is None


def test_shared_scale_groups_give_siblings_one_scale() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="fp8", shared_scale_groups=[["q_proj", "k_proj", "v_proj"]])
    attention = ModelQuantizer(config).quantize_model(llama(), tokens(8)).model.layers[0].self_attn
    scales = {float(attention.get_submodule(n).weight_quantizer.scale) for n in ("q_proj", "k_proj", "v_proj")}
    largest = max(
        float(llama().model.layers[0].self_attn.get_submodule(n).weight.detach().abs().max()) for n in ("q_proj", "k_proj", "v_proj")
    )
    assert scales == {torch.tensor(largest).div(448).item()}


def test_a_tied_head_that_is_quantized_leaves_the_embedding_alone() -> None:
    model = llama(tied=True)
    embedding = model.model.embed_tokens.weight.detach().clone()
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", exclude_layers=[])
    ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert is_quantized(model.lm_head)
    assert not torch.equal(model.lm_head.weight, embedding)


def test_a_frozen_model_is_trained_no_more() -> None:
    model = llama().requires_grad_(True)
    quantized = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_64")).quantize_model(model)
    rounded = [layer.weight for layer in model.modules() if isinstance(layer, QuantLinear)]
    assert not any(weight.requires_grad for weight in rounded), "values on a grid are not trained even before"
    assert ModelQuantizer.freeze(quantized) is model
    assert not any(p.requires_grad for p in model.parameters())


def test_the_configuration_given_is_never_changed() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="fp8", kv_cache_scheme="fp8")
    before = config.to_dict()
    ModelQuantizer(config).quantize_model(llama(), tokens(8))
    assert config.to_dict() == before


def test_the_plan_comes_first_and_completion_last(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quark"):
        ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int8")).quantize_model(llama(), tokens(8))
    assert caplog.messages[0].startswith("Plan: 14 of 16 layers")
    assert caplog.messages[-1] == "Model quantization has been completed."


def opt() -> OPTForCausalLM:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
    }
    return OPTForCausalLM(OPTConfig(**sizes, max_position_embeddings=64))


def gemma2() -> Gemma2ForCausalLM:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    return Gemma2ForCausalLM(Gemma2Config(**sizes, num_key_value_heads=2, max_position_embeddings=64))


@pytest.mark.parametrize(("build", "family"), [(opt, "opt"), (gemma2, "gemma2")], ids=["opt", "gemma2"])
def test_families_whose_blocks_get_arguments_of_their_own_calibrate(build: object, family: str) -> None:
    torch.manual_seed(0)
    model, data = build().eval(), tokens(6, 9)
    expected = {}
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n]
    for name in names:
        expected[name] = amax_of_inputs(model, name, data)
    ModelQuantizer(LLMTemplate.get(family).get_config(scheme="fp8")).quantize_model(model, data)
    found = {name: float(model.get_submodule(name).input_quantizer.scale) for name in names}
    assert found == {name: torch.tensor(value).div(448).item() for name, value in expected.items()}


class Picture(nn.Module):
    """A model of no family: convolutions, a transposed one, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(torch.relu(self.conv(x))).mean((2, 3)))


def test_a_model_of_no_known_family_is_one_block() -> None:
    torch.manual_seed(0)
    model, data = Picture(), [torch.randn(2, 3, 8, 8), torch.randn(1, 3, 6, 6)]
    expected = amax_of_inputs(model, "up", data)
    ModelQuantizer(QConfig(scheme("int8"))).quantize_model(model, data)
    assert isinstance(model.conv, QuantConv2d)
    assert isinstance(model.up, QuantConvTranspose2d)
    assert model.up.input_quantizer.scale.item() == pytest.approx(expected / 127.5, rel=1e-7)
    assert model(data[0]).shape == (2, 5)


def test_embeddings_are_quantized_where_they_are_named() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Embedding(8, 32), "b": nn.EmbeddingBag(8, 32), "c": nn.Embedding(8, 32), "d": nn.Linear(32, 32)})
    only_weight = QLayerConfig(weight=scheme("int4_wo_32").weight)
    config = QConfig(only_weight, layer_quant_config={"a": only_weight}, layer_type_quant_config={nn.EmbeddingBag: only_weight})
    ModelQuantizer(config).quantize_model(model)
    assert isinstance(model["a"], QuantEmbedding)
    assert isinstance(model["b"], QuantEmbeddingBag)
    assert type(model["c"]) is nn.Embedding
    assert model["a"](torch.tensor([1])).unique().numel() <= 16


def test_an_embedding_takes_the_weight_of_a_scheme_and_not_its_activations() -> None:
    model = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 4))
    config = QConfig(QLayerConfig(weight=scheme("int8").weight), layer_type_quant_config={nn.Embedding: scheme("int8")})
    ModelQuantizer(config).quantize_model(model)
    assert isinstance(model[0], QuantEmbedding)
    assert model[0].input_quantizer is None
    assert model(torch.tensor([1, 2])).shape == (2, 4)


def test_static_scales_without_data_are_refused_before_any_change() -> None:
    model = llama()
    with pytest.raises(CalibrationError, match="none was given"):
        ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int8")).quantize_model(model)
    assert not any(is_quantized(m) for m in model.modules())


def test_empty_data_are_refused_before_any_change() -> None:
    model = llama()
    with pytest.raises(CalibrationError, match="empty"):
        ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int8")).quantize_model(model, [])
    assert not any(is_quantized(m) for m in model.modules())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_before_any_change(value: float) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.mlp\.up_proj\.weight") as error:
        ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_64")).quantize_model(model)
    assert error.value.tensor == "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


def test_a_bias_that_is_not_finite_is_named_before_any_change() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    nn.init.constant_(model[1].bias, float("nan"))
    with pytest.raises(NonFiniteError, match=r"'?1\.bias"):
        ModelQuantizer(QConfig(scheme("int4_wo_32"))).quantize_model(model)
    assert not any(is_quantized(m) for m in model.modules())


def test_an_activation_that_is_not_finite_is_named() -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(3e38)
    with pytest.raises(NonFiniteError, match=r"input of 'model\.layers\.1\.self_attn\.q_proj'"):
        ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="fp8")).quantize_model(model, tokens(6))


def test_a_model_quantized_already_is_refused() -> None:
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_64"))
    model = quantizer.quantize_model(llama())
    with pytest.raises(ConfigError, match="quantized already: 14 layers"):
        quantizer.quantize_model(model)


def test_freeze_of_a_float_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a model that quantize_model has returned"):
        ModelQuantizer.freeze(llama())


def test_a_layer_no_sample_reaches_is_named() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    with pytest.raises(CalibrationError, match="'spare'"):
        ModelQuantizer(QConfig(scheme("int8"))).quantize_model(Forked(), [torch.randn(2, 4)])


def test_a_model_without_weights_is_refused_before_any_data_are_read() -> None:
    def data() -> Iterator[torch.Tensor]:
        yield pytest.fail("read")

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32))
    config = LLMTemplate.get("llama").get_config(scheme="int8")
    with pytest.raises(ConfigError, match=r"on the meta device .*quantize_checkpoint"):
        ModelQuantizer(config).quantize_model(model, data())
