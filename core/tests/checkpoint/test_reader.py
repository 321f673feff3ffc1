"""Reading an export: tied tensors, under whichever of their names it has them."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

from quark.config.model import QConfig
from quark.plugins import schemes
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors

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
