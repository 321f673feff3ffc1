"""Example modules for the registered operators. The conformance suite captures them as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["example"]


class _Function(nn.Module):
    """A module that calls one function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


_IMAGE, _SEQUENCE, _VECTORS = (2, 4, 8, 8), (2, 4, 8), (2, 8)

_MODULES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 6), _VECTORS),
    "embedding": (lambda: nn.Embedding(16, 8), ()),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), _SEQUENCE),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), _IMAGE),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3), (2, 4, 5, 5, 5)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), _SEQUENCE),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3), _IMAGE),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 6, 3), (2, 4, 5, 5, 5)),
    "layer_norm": (lambda: nn.LayerNorm(8), _VECTORS),
    "rms_norm": (lambda: nn.RMSNorm(8), _VECTORS),
    "group_norm": (lambda: nn.GroupNorm(2, 4), _IMAGE),
    "batch_norm": (lambda: nn.BatchNorm2d(4), _IMAGE),
    "prelu": (nn.PReLU, _VECTORS),
}
"""Name of an operator → constructor of a module and shape of its argument. An empty shape means indices."""

_FUNCTIONS: Mapping[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "add": (torch.add, (_VECTORS, _VECTORS)),
    "sub": (torch.sub, (_VECTORS, _VECTORS)),
    "mul": (torch.mul, (_VECTORS, _VECTORS)),
    "div": (lambda x: x / 3, (_VECTORS,)),
    "matmul": (torch.matmul, (_SEQUENCE, (2, 8, 3))),
    "attention": (functional.scaled_dot_product_attention, (_IMAGE, _IMAGE, _IMAGE)),
    "softmax": (lambda x: x.softmax(-1), (_VECTORS,)),
    "mean": (lambda x: x.mean(-1), (_VECTORS,)),
    "avg_pool": (lambda x: functional.avg_pool2d(x, 2), (_IMAGE,)),
    "adaptive_avg_pool": (lambda x: functional.adaptive_avg_pool2d(x, 2), (_IMAGE,)),
    "upsample_bilinear": (lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), (_IMAGE,)),
    "gelu": (functional.gelu, (_VECTORS,)),
    "silu": (functional.silu, (_VECTORS,)),
    "sigmoid": (torch.sigmoid, (_VECTORS,)),
    "tanh": (torch.tanh, (_VECTORS,)),
    "elu": (functional.elu, (_VECTORS,)),
    "leaky_relu": (functional.leaky_relu, (_VECTORS,)),
    "hardswish": (functional.hardswish, (_VECTORS,)),
    "hardsigmoid": (functional.hardsigmoid, (_VECTORS,)),
    "clamp": (lambda x: x.clamp(-1, 1), (_VECTORS,)),
    "relu": (torch.relu, (_VECTORS,)),
    "cat": (lambda *xs: torch.cat(xs, 1), (_VECTORS, _VECTORS)),
    "max_pool": (lambda x: functional.max_pool2d(x, 2), (_IMAGE,)),
    "amax": (lambda x: x.amax(-1), (_VECTORS,)),
    "reshape": (lambda x: x.reshape(2, -1), (_IMAGE,)),
    "transpose": (lambda x: x.transpose(1, 2), (_SEQUENCE,)),
    "expand": (lambda x: x[:, None].expand(2, 3, 8), (_VECTORS,)),
    "slice": (lambda x: x[:, 2:5], (_VECTORS,)),
    "split": (lambda x: x.chunk(2, 1)[0], (_VECTORS,)),
    "roll": (lambda x: x.roll(1, 1), (_VECTORS,)),
    "pixel_shuffle": (lambda x: functional.pixel_shuffle(x, 2), (_IMAGE,)),
    "upsample_nearest": (lambda x: functional.interpolate(x, scale_factor=2), (_IMAGE,)),
    "pad": (lambda x: functional.pad(x, (1, 1)), (_IMAGE,)),
    "identity": (lambda x: x.clone(), (_VECTORS,)),
}
"""Name of an operator → function and shapes of its arguments."""


def example(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a module whose graph has the operator ``name``, and arguments for the module.

    Args:
        name: Name of a record of this distribution.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make, shapes = _made(name)
        return make().eval(), tuple(torch.randn(shape) if shape else torch.arange(6) for shape in shapes)


def _made(name: str) -> tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]:
    if name in _MODULES:
        make, shape = _MODULES[name]
        return make, (shape,)
    function, shapes = _FUNCTIONS[name]
    return lambda: _Function(function), shapes
