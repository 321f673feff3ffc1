"""Choose a scheme for each layer within a size: ``python examples/mixed_precision.py OUT [MODEL TEXT]``.

The script writes the report OUT/quark_report.html. The report plots the loss over the size, and lists the
scheme of each layer.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quark.models.hf.tokenizer import load_tokenizer
from quark.runs import quantize_checkpoint
from quark_tiny_model import held_out_text, tiny_model_dir
from quark_workbench.data import read_samples, token_sequences
from quark_workbench.mixed_precision import Budget, select_schemes
from quark_workbench.report import ReportOptions

__all__ = ["main"]


def main(out: Path, source: Path | None = None, text: Path | None = None, count: int = 8, length: int = 128) -> dict[str, int]:
    """Choose FP8, MXFP4 or float for each group of layers, and quantize the model.

    The weights need at most 6 bits on average. Return a dictionary from scheme to the number of groups.
    """
    source = source or tiny_model_dir()
    samples = iter([held_out_text()]) if text is None else read_samples(text)
    batches = token_sequences(load_tokenizer(source), samples, count, length)
    result = select_schemes(source, ["fp8", "mxfp4", "bf16"], Budget(bits=6), batches)
    quantize_checkpoint(source, out, result.config, batches, report=ReportOptions(selection=result.to_dict()))
    chosen = list(result.selection.choices.values())
    return {name: chosen.count(name) for name in sorted(set(chosen))}


if __name__ == "__main__":
    print(main(*map(Path, sys.argv[1:])))
