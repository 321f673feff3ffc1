"""Try acme_nf3_g64 on quark's tiny model, alone and with acme_weighted, and print a line of JSON.

The script quantizes the model, exports it, loads the export, and compares it with the float model.

Usage: ``python try_it.py OUT``. The script writes the exports ``plain`` and ``weighted`` to the new directory
OUT. It refers to the plugin by name and never imports it.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, held_out_text, tiny_model, tiny_tokenizer
from quark_workbench.evaluate import perplexity, token_windows


def weight_only(dtype: str, observer: str) -> QConfig:
    """Return a configuration that quantizes the weights of all linear layers except the head."""
    spec = QTensorConfig(
        dtype=dtype, observer_cls=observer, is_dynamic=False, qscheme="per_group", ch_axis=-1, group_size=64, symmetric=True
    )
    return QConfig(global_quant_config=QLayerConfig(weight=spec), exclude=["lm_head"])


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits ``[B, T, V]`` of a model for ``tokens``."""
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


def tried(algorithm: str | None, out: Path, tokens: Tensor) -> tuple[nn.Module, dict[str, Any]]:
    """Quantize the tiny model, export it and load the export. Return the loaded model and figures about
    it."""
    config = LLMTemplate.get("llama").get_config(scheme="acme_nf3_g64", algorithm=algorithm)
    # The beginning of the held-out text is for evaluation, the end for calibration; they do not overlap.
    model: Any = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(8, 256))
    export_safetensors(model, out)
    loaded: Any = import_model_from_safetensors(None, out, device="cpu")
    by_transformers = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    expected = logits(model, tokens)
    return loaded, {
        "reload_equal": torch.equal(logits(loaded, tokens), expected),
        "transformers_equal": torch.equal(logits(by_transformers, tokens), expected),
        "settings": [settings.to_dict() for settings in loaded.quant_config.algo_config or []],
        "metrics": model.quark_report.to_dict()["layers"],
    }


def main(out: Path) -> None:
    """Quantize the tiny model in three ways, and print the figures.

    The three ways are the scheme alone, the scheme with the algorithm, and two-bit integers.
    """
    windows = token_windows(tiny_tokenizer(), held_out_text(), 256, limit=16)
    plain, found = tried(None, out / "plain", windows[:2])
    weighted, found_weighted = tried("acme_weighted", out / "weighted", windows[:2])
    coarse = ModelQuantizer(weight_only("int2", "PerGroupMinMaxObserver")).quantize_model(tiny_model())
    models = {"float": tiny_model(), "plain": plain, "weighted": weighted, "int2": coarse}
    nats = {name: math.log(perplexity(m, torch.split(windows, 4))) for name, m in models.items()}
    print(json.dumps({"plain": found, "weighted": found_weighted, "nats_per_token": nats}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
