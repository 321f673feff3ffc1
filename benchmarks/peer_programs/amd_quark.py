"""Quantize with AMD Quark or quark, which have the same API, and measure the run with `measuring.measured`.

``python amd_quark.py MODEL ALGORITHM SCHEME TOKENS``
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from measuring import measured
from torch import Tensor, nn

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization.config.config import Int2PerGroupSpec, Int3PerGroupSpec, QLayerConfig

GROUPS = {"int3_wo_64": Int3PerGroupSpec, "int2_wo_64": Int2PerGroupSpec}
"""Schemes that neither program has by name: symmetric integers in groups of 64, as in int4_wo_64."""


def main(path: str, algorithm: str, scheme: str, tokens: str) -> None:
    def quantize(model: nn.Module, calibration: Tensor) -> nn.Module:
        template = LLMTemplate.get(model.config.model_type)
        quantizer = ModelQuantizer(template.get_config(scheme=scheme, algorithm=[] if algorithm == "none" else algorithm.split("+")))
        return quantizer.freeze(quantizer.quantize_model(model, list(calibration.split(1))))

    for name, spec in GROUPS.items():
        weights = spec(ch_axis=-1, group_size=64, is_dynamic=False).to_quantization_spec()
        LLMTemplate.register_scheme(name, config=QLayerConfig(weight=weights))
    try:
        of = version("amd-quark")
    except PackageNotFoundError:
        of = version("quark-core")
    measured(of, path, tokens, quantize)


if __name__ == "__main__":
    main(*sys.argv[1:])
