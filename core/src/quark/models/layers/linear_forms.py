"""Test for subclasses of ``nn.Linear`` that compute the same as ``nn.Linear``, so that they can be quantized as such."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["is_verbatim_linear"]

_IN, _OUT = 3, 2
_TOLERANCE = 1e-12


def is_verbatim_linear(layer: nn.Module) -> bool:
    """Return whether a layer is an ``nn.Linear``, or of a subclass that computes the same, so that it can be quantized as such.

    The layer must have a weight and a bias and nothing else, and the forward of a copy with small random
    float64 tensors must give the result of ``nn.Linear``. This excludes routers that select experts, low-rank
    adapters, weights stored as codes, and grouped matrices.
    """
    if not isinstance(layer, nn.Linear) or layer._modules or layer._buffers:
        return False
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    plain = set(layer._parameters) == {"weight", "bias"} and type(weight) is nn.Parameter and weight.is_floating_point()
    if not plain or weight is None or tuple(weight.shape) != (layer.out_features, layer.in_features):
        return False
    return type(layer).forward is nn.Linear.forward or _forward_agrees(layer, has_bias=bias is not None)


def _forward_agrees(layer: nn.Linear, *, has_bias: bool) -> bool:
    # Models are prepared for loading under the meta device, where tensors have no values to compare.
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        sizes = ((_OUT, _IN), (_OUT,), (2, 2, _IN))
        weight, bias, x = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
        tiny = copy.copy(layer)
        tiny._parameters = {"weight": nn.Parameter(weight), "bias": nn.Parameter(bias) if has_bias else None}
        tiny.in_features, tiny.out_features = _IN, _OUT
        expected = functional.linear(x, weight, bias if has_bias else None)
        try:
            output = type(tiny).forward(tiny, x)
        except Exception:  # of any kind, since any class may be tested: a layer that cannot be called like a linear layer is none
            return False
        return isinstance(output, Tensor) and output.shape == expected.shape and torch.allclose(output, expected, rtol=0, atol=_TOLERANCE)
