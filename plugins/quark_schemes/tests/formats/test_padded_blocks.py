"""Blocks of MX formats that do not divide a row: the last one is quantized as if zeros filled it up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import ConfigError, UnsupportedError
from quark.numbers import PerGroup, PerPaddedGroup, TensorQuantizer, quantizer_for
from quark.plugins import schemes
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization.config import config as documented

BLOCKS = {
    **{
        name: getattr(documented, name)(ch_axis=-1).to_quantization_spec()
        for name in dir(documented)
        if name.startswith("OCP_MX") and name[6:7] in "FI"
    },
    "BFP16Spec": documented.BFP16Spec(ch_axis=-1).to_quantization_spec(),
}
TOKENS = torch.arange(24)[None]


def cut_and_whole(name: str, x: torch.Tensor, *, activation: bool) -> tuple[TensorQuantizer, torch.Tensor]:
    quantizer = quantizer_for(BLOCKS[name], activation=activation)
    granularity: Any = quantizer.granularity
    return quantizer, torch.nn.functional.pad(x, (0, -x.shape[-1] % granularity.size))


@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 100), seed=st.integers(0, 1000), exponent=st.integers(-30, 30))
def test_it_equals_the_padded_tensor_cut_off_bit_for_bit(
    name: str, activation: bool, rows: int, columns: int, seed: int, exponent: int
) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    quantizer, padded = cut_and_whole(name, x, activation=activation)
    values, qparams = quantizer.round_to_nearest(x)
    whole, scales = quantizer.round_to_nearest(padded)
    assert torch.equal(values, whole[:, :columns])
    assert torch.equal(qparams.scale, scales.scale)
    codes = quantizer.quantize(x, qparams)
    assert torch.equal(codes.float(), quantizer.quantize(padded, scales)[:, :columns].float())
    again, stored = quantizer.unpack(quantizer.pack(codes, qparams), (rows, columns))
    assert torch.equal(quantizer.dequantize(again, stored), values)


def test_rows_that_blocks_divide_are_quantized_as_before() -> None:
    padded, plain = PerPaddedGroup(32), PerGroup(32)
    x = torch.arange(128.0).reshape(2, 64)
    assert padded.rows(x).data_ptr() == x.data_ptr()  # a view
    assert torch.equal(padded.rows(x), plain.rows(x))
    for method in ("scale_shape", "runs"):
        assert getattr(padded, method)((2, 64)) == getattr(plain, method)((2, 64))
    assert (padded.columns_per_scale(64), padded.columns_per_scale(65)) == (32, None)
    assert padded.runs((2, 65)) is None


def test_a_scale_is_spread_over_columns_and_found_again() -> None:
    scale = torch.arange(6.0).reshape(2, 3)
    spread = PerPaddedGroup(4).expand_scale(scale, (2, 10))
    assert spread[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert torch.equal(PerPaddedGroup(4).reduce_scale(spread, (2, 10)), scale)


def model() -> LlamaForCausalLM:
    """A model with 72 and 100 input channels."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, tie_word_embeddings=False, **sizes)).eval()


def quantized(config: QLayerConfig, algorithm: str | None = None) -> Any:
    algorithms = None if algorithm is None else LLMTemplate.get("llama").get_config("mxfp4", algorithm=algorithm).algo_config
    return ModelQuantizer(QConfig(config, exclude=["lm_head"], algo_config=algorithms)).quantize_model(model(), [TOKENS])


CONFIGS = {
    "mxfp4": schemes().load_config("mxfp4")(),
    "mxfp6_e2m3": schemes().load_config("mxfp6_e2m3")(),
    "bfp16": schemes().load_config("bfp16")(),
    "mxfp8": QLayerConfig(weight=BLOCKS["OCP_MXFP8E4M3Spec"]),
    "mxint8": QLayerConfig(weight=BLOCKS["OCP_MXINT8Spec"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_exported_and_read_back_to_the_bit(name: str, tmp_path: Path) -> None:
    made = quantized(CONFIGS[name])
    export_safetensors(made, tmp_path / "out")
    wanted = made(TOKENS).logits
    for packed in (False, True):
        assert torch.equal(import_model_from_safetensors(model(), str(tmp_path / "out"), packed=packed)(TOKENS).logits, wanted)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(TOKENS).logits, wanted)


@pytest.mark.parametrize("algorithm", ["gptq", "awq", "qronos", "tuning"])
def test_algorithms_leave_values_that_codes_stand_for(algorithm: str) -> None:
    made = quantized(CONFIGS["mxfp4"], algorithm)
    layer = made.model.layers[0].mlp.down_proj
    quantizer, qparams = layer.weight_quantizer.quantizer, layer.weight_quantizer.qparams
    assert qparams.scale.shape == (72, 4)
    assert torch.equal(quantizer.dequantize(quantizer.codes_of(layer.weight, qparams), qparams), layer.weight)


@pytest.mark.parametrize("layout", ["compressed_tensors", "gguf", "onnx"])
def test_layouts_that_cannot_hold_them_say_so_before_any_work(layout: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"rows of 72 elements, which blocks of 32 do not divide|in rows of 72"):
        export_safetensors(quantized(CONFIGS["mxfp4"]), tmp_path / "out", custom_mode=layout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["mx6", "mx9", "nvfp4", "int4_wo_32"])
def test_other_groups_have_to_divide(name: str) -> None:
    with pytest.raises(ConfigError, match="do not divide"):
        ModelQuantizer(QConfig(schemes().load_config(name)())).quantize_model(nn.Sequential(nn.Linear(40, 32)), [torch.randn(2, 40)])
