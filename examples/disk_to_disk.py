"""Quantize from checkpoint to checkpoint, block by block: ``python examples/disk_to_disk.py OUT [MODEL]``.

``quark quantize`` does the same. If the run is killed, start it again. It then continues after the finished
blocks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quark.models.hf.model_config import model_config
from quark.plugins import Event, listening
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_tiny_model import tiny_model_dir
from quark_workbench.report import ReportOptions

__all__ = ["main"]


def main(out: Path, source: Path | None = None) -> list[str]:
    """Quantize to MXFP4 weights, and return a line for each block."""
    source, lines = source or tiny_model_dir(), list[str]()

    def hear(event: Event) -> None:
        if event.name == "block_finished":
            facts = event.to_dict()
            lines.append(f"{facts['block']}: {facts['seconds']:.1f} s, {facts['seconds_left']:.0f} s left")

    config = LLMTemplate.get(model_config(source).model_type).get_config(scheme="mxfp4_weight_only")
    with listening(hear):
        quantize_checkpoint(source, out, config, report=ReportOptions(), resume=True)
    return lines


if __name__ == "__main__":
    print("\n".join(main(*map(Path, sys.argv[1:]))))
