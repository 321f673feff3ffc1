"""Quantize with llm-compressor, and measure the run with `measuring.measured`.

``python llm_compressor.py MODEL ALGORITHM SCHEME TOKENS``
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from measuring import measured
from torch import Tensor, nn

ROUNDINGS = {"none": QuantizationModifier, "awq": QuantizationModifier, "gptq": GPTQModifier, "autoround": AutoRoundModifier}
"""The modifier that chooses the codes, by the last of a run's algorithms. AWQ runs before the modifier."""
WEIGHTS = {
    "int4_wo_64": {"num_bits": 4, "strategy": "group", "group_size": 64},
    "int3_wo_64": {"num_bits": 3, "strategy": "group", "group_size": 64},
    "int2_wo_64": {"num_bits": 2, "strategy": "group", "group_size": 64},
    "int4_wo_per_channel": {"num_bits": 4, "strategy": "channel"},
}
"""Symmetric integers; other schemes have the same name in llm-compressor."""


def scheme_of(name: str) -> QuantizationScheme:
    if name in WEIGHTS:
        return QuantizationScheme(targets=["Linear"], weights={"type": "int", "symmetric": True, **WEIGHTS[name]})
    return preset_name_to_scheme(name.upper(), ["Linear"])


def main(path: str, algorithm: str, scheme: str, tokens: str) -> None:
    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda tensor, *_: tensor  # AWQModifier pins memory, which fails on a machine without a GPU

    def quantize(model: nn.Module, calibration: Tensor) -> nn.Module:
        names = algorithm.split("+")
        recipe = [AWQModifier()] if names[0] == "awq" else []
        recipe += [ROUNDINGS[names[-1]](config_groups={"group": scheme_of(scheme)}, ignore=["lm_head"])]
        data = Dataset.from_dict({"input_ids": calibration.tolist(), "attention_mask": torch.ones_like(calibration).tolist()})
        oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=calibration.shape[1], num_calibration_samples=len(data))
        return model

    measured(version("llmcompressor"), path, tokens, quantize)


if __name__ == "__main__":
    main(*sys.argv[1:])
