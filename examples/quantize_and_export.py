"""Quantize and export for transformers and vLLM: ``python examples/quantize_and_export.py OUT [MODEL]``.

MODEL is a directory in Hugging Face form; the default is the tiny model that comes with quark.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_tiny_model import tiny_model_dir

__all__ = ["main"]


def main(out: Path, source: Path | None = None) -> str:
    """Quantize weights to INT4 in groups of 64, export, load the export, and return a generated text."""
    source = source or tiny_model_dir()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    config = LLMTemplate.get(model.config.model_type).get_config(scheme="int4_wo_64")
    model = ModelQuantizer(config).quantize_model(model)
    export_safetensors(model, out)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(out)

    quantized = AutoModelForCausalLM.from_pretrained(out, dtype="auto")  # vLLM serves it too
    prompt = tokenizer("And God said, Let there be", return_tensors="pt")
    tokens = quantized.generate(**prompt, do_sample=False, max_new_tokens=8)
    return str(tokenizer.decode(tokens[0]))


if __name__ == "__main__":
    print(main(*map(Path, sys.argv[1:])))
