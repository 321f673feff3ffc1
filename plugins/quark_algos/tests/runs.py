"""Runs of calibrated rounding on the bundled tiny model, and questions to their results."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.config.algorithm import AlgoConfig
from quark.models.layers import QuantizedLayer
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos.gptq.config import QronosConfig

QRONOS = QronosConfig(inside_layer_modules=[], model_decoder_layers="")
BLOCKS = 2
TOKENS, LAYERS = 512, 7 * BLOCKS


@cache
def float_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The first blocks of the tiny model; to be copied, not changed."""
    return tiny.tiny_model(dtype, BLOCKS)


@cache
def data() -> list[Tensor]:
    """Calibration data, unless a test says otherwise."""
    return list(torch.cat(tiny.calibration_batches(4, 128)).split(2))


@cache
def _float_logits() -> list[Tensor]:
    with torch.no_grad():
        return [float_model()(x).logits for x in data()]


def quantized(settings: AlgoConfig | None, scheme: str = "int4_wo_64", batches: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of the tiny model, rounded by those settings, or to nearest."""
    config = LLMTemplate.get("llama").get_config(scheme=scheme)
    config.algo_config = [settings] if settings else None
    return ModelQuantizer(config).quantize_model(copy.deepcopy(float_model(dtype)), data() if batches is None else batches)


def quantized_once(settings: AlgoConfig, scheme: str = "int4_wo_64") -> Any:
    """As `quantized`, by the first run with these settings; not to be changed."""
    key = f"{scheme} {settings!r}"
    if key not in _QUANTIZED:
        _QUANTIZED[key] = quantized(settings, scheme)
    return _QUANTIZED[key]


_QUANTIZED: dict[str, Any] = {}


@cache
def to_nearest(scheme: str = "int4_wo_64", dtype: torch.dtype = torch.float32) -> Any:
    """Rounded to nearest; not to be changed."""
    return quantized(None, scheme, dtype=dtype)


def error(model: nn.Module) -> float:
    """Mean squared error of a logit on `data`."""
    with torch.no_grad():
        return float(sum((model(x).logits - y).square().mean() for x, y in zip(data(), _float_logits(), strict=True)))


def layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Its quantized layers."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all bits are equal."""
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def off_grid(model: nn.Module) -> list[str]:
    """Return the layers whose weight differs from that of its codes."""
    found = []
    for name, layer in layers(model).items():
        assert layer.weight_quantizer is not None
        quantizer, qparams = layer.weight_quantizer.quantizer, layer.weight_quantizer.qparams
        assert qparams is not None
        weight = layer.weight.detach().float()
        again = quantizer.dequantize(quantizer.codes_of(weight, qparams), qparams).to(layer.weight.dtype)
        found += [] if torch.equal(again, layer.weight) else [name]
    return found
