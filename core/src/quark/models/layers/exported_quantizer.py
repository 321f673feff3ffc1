"""Quantizers in programs of ``torch.export``: the operator ``quark::fake_quantize``, which is registered when this module is imported.

A program calls no Python code of a module, and a quantizer's is nothing that torch could trace. So a
quantizer is one operator in it, with its spec as text: a saved program computes what the model did, bit for
bit, wherever ``quark.models.layers`` is imported.
"""

from __future__ import annotations

import json
from functools import lru_cache

import torch
from torch import Tensor

from quark.config.layer import levels
from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.numbers import QParams, TensorQuantizer, quantizer_for

__all__ = ["exported"]


def _fake_quantize(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, outer_scale: Tensor | None, spec: str, activation: bool
) -> Tensor:
    """Return ``x`` fake-quantized, in its dtype and shape."""
    qparams = None if scale is None else QParams(scale, zero_point, outer_scale)
    return _quantizer_of(spec, activation).fake_quantize(x, qparams)


# Written out: torch cannot read it off annotations that are not evaluated.
_SCHEMA = "(Tensor x, Tensor? scale, Tensor? zero_point, Tensor? outer_scale, str spec, bool activation) -> Tensor"
_operator = torch.library.custom_op("quark::fake_quantize", _fake_quantize, mutates_args=(), schema=_SCHEMA)


@_operator.register_fake
def _shape_only(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, outer_scale: Tensor | None, spec: str, activation: bool
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _quantizer_of(spec: str, activation: bool) -> TensorQuantizer:
    specs = [QTensorConfig.from_dict(level) for level in json.loads(spec)]
    return quantizer_for(specs[0] if len(specs) == 1 else specs, activation=activation)


def exported(x: Tensor, quantizer: TensorQuantizer, qparams: QParams | None) -> Tensor:
    """Return ``x`` fake-quantized, as a program that is being exported shall compute it.

    Raises:
        UnsupportedError: The spec alone does not say what the quantizer does.
    """
    spec = json.dumps([level.to_dict() for level in levels(quantizer.spec)])
    activation = next((a for a in (True, False) if _quantizer_of(spec, a).granularity == quantizer.granularity), None)
    if activation is None or type(_quantizer_of(spec, activation)) is not type(quantizer):
        raise UnsupportedError(
            f"torch.export cannot take a quantizer with scales of {quantizer.granularity} in a view of the tensor: use one scale"
        )
    scales = (None, None, None) if qparams is None else (qparams.scale, qparams.zero_point, qparams.outer_scale)
    result: Tensor = _operator(x, *scales, spec, activation)
    return result
