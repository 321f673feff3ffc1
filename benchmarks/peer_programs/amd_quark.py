"""Quantize through the API that AMD Quark and quark share: ``python amd_quark.py MODEL WORK TOKENS`` (`measuring.measured`)."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from measuring import measured
from torch import Tensor, nn

from quark.torch import LLMTemplate, ModelQuantizer


def main(path: str, work: str, tokens: str) -> None:
    def quantize(model: nn.Module, calibration: Tensor) -> nn.Module:
        template = LLMTemplate.get(model.config.model_type)
        quantizer = ModelQuantizer(template.get_config(scheme="int4_wo_64", algorithm=None if work == "nearest" else work))
        return quantizer.freeze(quantizer.quantize_model(model, list(calibration.split(1))))

    try:
        of = version("amd-quark")
    except PackageNotFoundError:
        of = version("quark-core")
    measured(of, path, tokens, quantize)


if __name__ == "__main__":
    main(*sys.argv[1:])
