"""A tied output head that is quantized has a weight of its own, and keeps it wherever the export is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig, T5Config, T5ForConditionalGeneration

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization import FP8E4M3PerTensorSpec, Int2PerGroupSpec, Int4PerChannelSpec, Int4PerGroupSpec, Int8PerTensorSpec
from quark_tiny_model import tiny_model

IDS = torch.arange(40).reshape(2, 20)
WEIGHTS: dict[str, QTensorConfig] = {
    "int8": Int8PerTensorSpec(is_dynamic=False).to_quantization_spec(),
    "int4 per channel": Int4PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec(),
    "int4 per group": Int4PerGroupSpec(ch_axis=-1, group_size=32, is_dynamic=False).to_quantization_spec(),
    "int2 per group": Int2PerGroupSpec(ch_axis=-1, group_size=32, is_dynamic=False).to_quantization_spec(),
    "fp8": FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec(),
    "mxfp4": LLMTemplate.get("llama").get_config(scheme="mxfp4").global_quant_config.weight,
}


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_a_quantized_tied_head_reloads_into_a_float_model(weight: QTensorConfig, tmp_path: Path) -> None:
    model = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=weight))).quantize_model(tiny_model())
    export_safetensors(model, tmp_path / "out")
    given = tiny_model()
    assert given.lm_head.weight is given.model.embed_tokens.weight
    assert torch.equal(logits(import_model_from_safetensors(given, tmp_path / "out")), logits(model))
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))


def test_so_it_does_in_the_family_of_the_documented_example(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    family = OPTConfig(**sizes, max_position_embeddings=64, word_embed_proj_dim=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family).eval()
    ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=WEIGHTS["int8"]))).quantize_model(model)
    export_safetensors(model, tmp_path / "out")
    given = AutoModelForCausalLM.from_config(family)
    assert torch.equal(logits(import_model_from_safetensors(given, tmp_path / "out")), logits(model))


def test_quantized_embeddings_reload_beside_the_float_head_that_was_tied_to_them(tmp_path: Path) -> None:
    layer = QLayerConfig(weight=WEIGHTS["int8"])
    config = QConfig(global_quant_config=layer, exclude=["lm_head"], layer_type_quant_config={nn.Embedding: layer})
    model = ModelQuantizer(config).quantize_model(tiny_model())
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(tiny_model(), tmp_path / "out")), logits(model))


def test_a_float_head_that_the_export_does_not_hold_stays_tied(tmp_path: Path) -> None:
    config = QConfig(global_quant_config=QLayerConfig(weight=WEIGHTS["int8"]), exclude=["lm_head"])
    model = ModelQuantizer(config).quantize_model(tiny_model())
    export_safetensors(model, tmp_path / "out")
    for given in (tiny_model(), None):
        back = import_model_from_safetensors(given, tmp_path / "out")
        assert back.lm_head.weight is back.model.embed_tokens.weight
        assert torch.equal(logits(back), logits(model))


def test_one_of_three_tied_tensors_is_quantized_and_the_others_stay_tied(tmp_path: Path) -> None:
    """The export holds the shared embedding and the head.

    The encoder's and the decoder's embeddings are the shared one.
    """
    sizes = {"vocab_size": 64, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    family = T5Config(**sizes)
    model = T5ForConditionalGeneration(family).eval()
    ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=WEIGHTS["int8"]))).quantize_model(model)
    export_safetensors(model, tmp_path / "out")
    back = import_model_from_safetensors(T5ForConditionalGeneration(family), tmp_path / "out")
    assert back.encoder.embed_tokens.weight is back.decoder.embed_tokens.weight is back.shared.weight
    with torch.no_grad():
        expected, found = (m(input_ids=IDS, decoder_input_ids=IDS).logits for m in (model, back))
    assert torch.equal(found, expected)


def test_a_float_head_of_its_own_is_kept_though_the_config_says_tied(tmp_path: Path) -> None:
    config = QConfig(global_quant_config=QLayerConfig(weight=WEIGHTS["int8"]), exclude=["lm_head"])
    export_safetensors(ModelQuantizer(config).quantize_model(tiny_model()), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] * 2
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    for given in (tiny_model(), None):
        back = import_model_from_safetensors(given, tmp_path / "out")
        assert torch.equal(back.lm_head.weight, head)
        assert torch.equal(back.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
