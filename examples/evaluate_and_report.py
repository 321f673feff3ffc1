"""Compare an export with its float model: ``python examples/evaluate_and_report.py OUT [MODEL]``.

``quark evaluate`` and ``quark report`` do the same from the command line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quark.models.hf.loading import load_model
from quark.models.hf.model_config import model_config
from quark.models.hf.tokenizer import load_tokenizer
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_tiny_model import held_out_text, tiny_model_dir
from quark_workbench.evaluate import compare, protocol_of, scored_windows
from quark_workbench.report import ReportOptions, read_report

__all__ = ["main"]


def main(out: Path, source: Path | None = None) -> list[str]:
    """Quantize to NVFP4, compare the result with the float model, and return the figures as lines of text."""
    source = source or tiny_model_dir()
    config = LLMTemplate.get(model_config(source).model_type).get_config(scheme="nvfp4")
    config.global_quant_config.input_tensors = None  # weights alone need no calibration data
    quantize_checkpoint(source, out, config, report=ReportOptions("full"))

    windows = scored_windows(load_tokenizer(source), held_out_text(), protocol_of("quark", seq_len=128), 8)
    comparison = compare(load_model(out), load_model(source), windows.split(4))
    report = read_report(out)
    assert report is not None
    worst = min((layer for layer in report["layers"] if layer["snr_db"] is not None), key=lambda layer: layer["snr_db"])
    return [
        f"perplexity {comparison.perplexity:.2f}, float model {comparison.reference_perplexity:.2f}",
        f"KL divergence {comparison.mean_kl:.4f} nats per token, the same best token {comparison.top1_agreement:.0%} of the time",
        f"{report['sizes']['effective_bits']:.2f} bits per weight; worst layer {worst['name']} with {worst['snr_db']:.1f} dB",
        *(f"{flag['level']}: {flag['title']}" for flag in report["flags"]),
    ]


if __name__ == "__main__":
    print("\n".join(main(*map(Path, sys.argv[1:]))))
