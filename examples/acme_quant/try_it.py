"""Tries acme_nf3_g64 on quark's bundled tiny model: quantize, export, load, compare. Prints one line of JSON.

Usage: ``python try_it.py OUT``, where OUT is a directory that does not exist. The plugin is named and never imported here.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quark.evaluate import perplexity, token_windows
from quark.specs.layer import QLayerConfig
from quark.specs.model import QConfig
from quark.specs.tensor import QTensorConfig
from quark.testing.tiny import held_out_text, tiny_model, tiny_tokenizer
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors


def weight_only(dtype: str, observer: str) -> QConfig:
    """Weights of all linear layers but the head in groups of 64."""
    spec = QTensorConfig(
        dtype=dtype, observer_cls=observer, is_dynamic=False, qscheme="per_group", ch_axis=-1, group_size=64, symmetric=True
    )
    return QConfig(global_quant_config=QLayerConfig(weight=spec), exclude=["lm_head"])


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits ``[B, T, V]``."""
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


def main(out: Path) -> None:
    """Quantize with the scheme, and for comparison with two-bit integers; print what was found."""
    windows = token_windows(tiny_tokenizer(), held_out_text(), 256, limit=16)
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="acme_nf3_g64")).quantize_model(tiny_model())
    export_safetensors(model, out)
    expected = logits(model, windows[:2])
    loaded = import_model_from_safetensors(None, out, device="cpu")
    by_transformers = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    coarse = ModelQuantizer(weight_only("int2", "PerGroupMinMaxObserver")).quantize_model(tiny_model())
    nats = {
        name: math.log(perplexity(m, torch.split(windows, 4)))
        for name, m in {"float": tiny_model(), "acme_nf3": loaded, "int2": coarse}.items()
    }
    found = {
        "reload_equal": torch.equal(logits(loaded, windows[:2]), expected),
        "transformers_equal": torch.equal(logits(by_transformers, windows[:2]), expected),
        "nats_per_token": nats,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
