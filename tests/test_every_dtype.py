"""Every member of Dtype quantizes each tensor of a layer, is exported and read back to the bit, or is refused by a
sentence."""

from pathlib import Path

import attrs
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from quark.config.enums import Dtype
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_devkit.example_specs import examples

REFUSED = {"fp8_e5m3": "fp8_e5m3 has no sign and holds only scales"}
TOKENS = torch.arange(12)[None]


def model() -> Qwen2ForCausalLM:
    """A block with biases."""
    torch.manual_seed(0)
    shapes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=128, tie_word_embeddings=False, **shapes)).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return made


def spec_of(dtype: Dtype) -> QTensorConfig:
    """A static spec of the format, of one scale if there is one."""
    found = [level for example in examples([dtype.name]) for level in [example.spec] if not level.is_dynamic]
    one = next((spec for spec in found if getattr(spec.qscheme, "name", None) == "per_tensor"), found[0])
    return attrs.evolve(one, is_scale_quant=False)


@pytest.mark.parametrize("role", ["weight", "bias", "input_tensors", "output_tensors"])
@pytest.mark.parametrize("dtype", Dtype, ids=lambda dtype: dtype.name)
def test_every_dtype_works_or_is_refused_by_a_sentence(dtype: Dtype, role: str, tmp_path: Path) -> None:
    config = QConfig(QLayerConfig(**{role: spec_of(dtype)}), exclude=["lm_head"])
    if dtype.name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[dtype.name]):
            ModelQuantizer(config).quantize_model(model(), [TOKENS])
        return
    quantized = ModelQuantizer(config).quantize_model(model(), [TOKENS])
    export_safetensors(quantized, tmp_path / "out")
    again = import_model_from_safetensors(model(), str(tmp_path / "out"))
    assert torch.equal(again(input_ids=TOKENS).logits, quantized(input_ids=TOKENS).logits)
