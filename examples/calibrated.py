"""Quantize by AWQ and GPTQ on a calibration text: ``python examples/calibrated.py OUT [MODEL TEXT]``.

Without MODEL, the script uses the tiny model and its text.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quark.models.hf.loading import load_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_tiny_model import held_out_text, tiny_model_dir
from quark_workbench.data import read_samples, token_sequences

__all__ = ["main"]


def main(out: Path, source: Path | None = None, text: Path | None = None, count: int = 16, length: int = 128) -> dict[str, float]:
    """Quantize and export. Return each layer's output error divided by the output error of round-to-nearest.

    The errors are measured on held-out tokens.
    """
    source = source or tiny_model_dir()
    tokenizer = load_tokenizer(source)
    samples = iter([held_out_text()]) if text is None else read_samples(text)
    batches = token_sequences(tokenizer, samples, count, length)

    model = load_model(source)
    template = LLMTemplate.get(model.config.model_type)
    config = template.get_config(scheme="int4_wo_64", algorithm=["awq", "gptq"])
    model = ModelQuantizer(config).quantize_model(model, batches)  # AWQ moves scale, then GPTQ chooses codes
    export_safetensors(model, out)
    report = model.quark_report  # metrics of the run
    return {name: metrics["held_out_error"] for name, metrics in report.layers.items() if "held_out_error" in metrics}


if __name__ == "__main__":
    shares = main(*map(Path, sys.argv[1:]))
    for name, share in sorted(shares.items(), key=lambda item: -item[1])[:5]:
        print(f"{name}: {share:.2f} of the error of round-to-nearest")
