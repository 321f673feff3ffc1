"""Quantize by llm-compressor: ``python llm_compressor.py MODEL WORK TOKENS`` (`measuring.measured`)."""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from measuring import measured
from torch import Tensor, nn

WORKS = {"nearest": QuantizationModifier, "gptq": GPTQModifier}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}


def main(path: str, work: str, tokens: str) -> None:
    def quantize(model: nn.Module, calibration: Tensor) -> nn.Module:
        recipe = WORKS[work](config_groups={"group": {"targets": ["Linear"], "weights": WEIGHTS}}, ignore=["lm_head"])
        data = Dataset.from_dict({"input_ids": calibration.tolist(), "attention_mask": torch.ones_like(calibration).tolist()})
        oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=calibration.shape[1], num_calibration_samples=len(data))
        return model

    measured(version("llmcompressor"), path, tokens, quantize)


if __name__ == "__main__":
    main(*sys.argv[1:])
