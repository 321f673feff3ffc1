"""Reading an export finds tied tensors under any of their names."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

from quark.config.model import QConfig
from quark.plugins import schemes
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import tiny_model

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_embeddings_that_are_stored_as_the_head_before_them_are_read(tmp_path: Path) -> None:
    model = XLMRobertaForMaskedLM(XLMRobertaConfig(**SIZES, max_position_embeddings=64)).eval()
    assert next(iter(model.state_dict())).startswith("lm_head")
    layer = schemes().load_config("int4_wo_32")()
    ModelQuantizer(QConfig(global_quant_config=layer, exclude=["lm_head*"])).quantize_model(model)
    export_safetensors(model, tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        assert "roberta.embeddings.word_embeddings.weight" not in file.keys()  # noqa: SIM118 - no mapping
    read = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    assert read.lm_head.decoder.weight is read.roberta.embeddings.word_embeddings.weight
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits)


def test_settings_of_generation_are_read_again(tmp_path: Path) -> None:
    model = tiny_model(blocks=1)
    model.generation_config.update(max_new_tokens=7, suppress_tokens=[3, 5])
    ModelQuantizer(QConfig(global_quant_config=schemes().load_config("ptpc_fp8")())).quantize_model(model)
    export_safetensors(model, tmp_path)
    read: Any = import_model_from_safetensors(None, tmp_path, device="cpu")
    assert (read.generation_config.max_new_tokens, read.generation_config.suppress_tokens) == (7, [3, 5])
