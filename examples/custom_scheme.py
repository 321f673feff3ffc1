"""Register your own scheme while a program runs: ``python examples/custom_scheme.py OUT``.

To distribute a scheme, write a plugin: see ``examples/acme_quant``, or run
``quark new-plugin acme-quant --scheme``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.quantization import Int8PerTensorSpec, QLayerConfig, Uint4PerGroupSpec
from quark_tiny_model import tiny_model

__all__ = ["main"]


def main(out: Path) -> list[str]:
    """Register a scheme with INT8 inputs and UINT4 weights in groups of 32. Use the scheme and return the
    plan."""
    weight = Uint4PerGroupSpec(ch_axis=-1, group_size=32, is_dynamic=False).to_quantization_spec()
    inputs = Int8PerTensorSpec(is_dynamic=True, symmetric=True).to_quantization_spec()
    LLMTemplate.register_scheme("my_w4a8", config=QLayerConfig(weight=weight, input_tensors=inputs))
    try:
        config = LLMTemplate.get("llama").get_config(scheme="my_w4a8", layer_config={"*.down_proj": "fp8"}, exclude_layers=["lm_head"])
        config.layer_quant_config["*.down_proj"].input_tensors = None  # weights alone need no calibration data
        model = ModelQuantizer(config).quantize_model(tiny_model())
    finally:
        LLMTemplate.unregister_scheme("my_w4a8")
    export_safetensors(model, out)
    return [f"{row.name}: {row.reason}" for row in model.quark_plan.quantized]


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1]))))
