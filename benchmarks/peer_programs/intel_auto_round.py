"""Quantize with auto-round at its default settings, and measure the run with `measuring.measured`.

``python intel_auto_round.py MODEL autoround SCHEME TOKENS``
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch
from auto_round import AutoRound
from measuring import measured
from torch import Tensor, nn
from transformers import AutoTokenizer

SCHEMES = {
    "int4_wo_64": {"scheme": "W4A16", "group_size": 64, "sym": True},
    "int3_wo_64": {"scheme": "W3A16", "group_size": 64, "sym": True},
    "int2_wo_64": {"scheme": "W2A16", "group_size": 64, "sym": True},
    "int4_wo_per_channel": {"scheme": "W4A16", "group_size": -1, "sym": True},
    "mxfp4": {"scheme": "MXFP4"},
    "nvfp4": {"scheme": "NVFP4"},
}


def main(path: str, algorithm: str, scheme: str, tokens: str) -> None:
    if algorithm != "autoround":
        raise SystemExit(f"auto-round has only the algorithm autoround, not {algorithm}")

    def quantize(model: nn.Module, calibration: Tensor) -> nn.Module:
        count, length = calibration.shape
        samples = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in calibration]
        data = torch.utils.data.DataLoader(samples, batch_size=count)
        tuner = AutoRound(
            model, AutoTokenizer.from_pretrained(path), dataset=data, seqlen=length, nsamples=count, device_map="cpu", **SCHEMES[scheme]
        )
        quantized: nn.Module = tuner.quantize()[0]
        return quantized.float()  # auto-round returns bfloat16; the other programs are evaluated in float32

    measured(version("auto-round"), path, tokens, quantize)


if __name__ == "__main__":
    main(*sys.argv[1:])
