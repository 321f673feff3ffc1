"""Rotations that run with the model: of a layer's input, such as R4 before the MLP's output projection, undone in the layer's weight."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark_algos.mappings.resolve import input_axis
from quark_algos.rotation.hadamard import Rotation
from quark_algos.rotation.online_matrix import product

__all__ = ["InputRotation", "install", "is_rotated", "rotate_input"]


class InputRotation:
    """A hook before a layer's forward: the layer gets ``x · R``, R of equal blocks ``M / √size``, M of +1 and -1, on its diagonal.

    All layers of a model that are rotated in blocks of one size share one of these, whatever their width. It is no module: a layer with it
    has the children and tensors that it had, and is quantized like any other.

    Args:
        size: Of a block; order of a Hadamard matrix that is known here.

    Attributes:
        transforms_input: As `quark.algorithms.input_is_transformed` wants it.
        size: As given.
        matrix: M, ``[size, size]``, float32, on any device, where it is another than that of
            `quark_algos.rotation.online_matrix`; None otherwise.

    Raises:
        ConfigError: No Hadamard matrix of that order is known here.
    """

    transforms_input: ClassVar[bool] = True

    def __init__(self, size: int) -> None:
        Rotation(size, size)
        self.size = size
        self.matrix: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """``x · R`` along the last axis, computed in float32, or float64 where ``x`` is, and rounded once.

        Args:
            x: ``[…, width]``, of a floating dtype; the size divides the width.

        Returns:
            A new tensor of that shape and dtype, on that device.

        Raises:
            ConfigError: The size does not divide the width.
        """
        Rotation(x.shape[-1], self.size)  # sees that it fits
        master = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32).unflatten(-1, (-1, self.size))
        found = product(master, self.size) if self.matrix is None else master @ self.matrix.to(device=x.device, dtype=master.dtype)
        return (found / self.size**0.5).flatten(-2).to(x.dtype)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """As torch calls a forward pre-hook."""
        return (self.apply(args[0]), *args[1:])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size})"


@torch.no_grad()
def rotate_input(layer: nn.Module, rotation: InputRotation) -> None:
    """Fold R into a layer's weight, and rotate its input by R from now on; the layer computes what it did.

    The weight is made anew, ``W · R``, computed in float32, or float64 where it is that, and rounded once.

    Args:
        layer: A linear one, or one of those that keep the weight transposed.
        rotation: Of a size that divides the width of the layer's input.

    Raises:
        ConfigError: The layer's input is rotated already, or has a width that the size does not divide.
    """
    if is_rotated(layer):
        raise ConfigError("the input of this layer is rotated already; rotate it once")
    old, transposed = layer.get_parameter("weight"), input_axis(layer) == 0
    new = rotation.apply(old.t()).t() if transposed else rotation.apply(old)
    layer.weight = nn.Parameter(new.contiguous(), requires_grad=old.requires_grad)
    install(layer, rotation)


def install(layer: nn.Module, rotation: InputRotation) -> None:
    """Rotate a layer's input from now on, and leave its weight as it is: it is that for a rotated input already.

    The hook comes first, so that whatever else looks at the layer's input sees the rotated one.
    """
    layer.register_forward_pre_hook(rotation, prepend=True)


def is_rotated(layer: nn.Module) -> bool:
    """Whether a layer's input is rotated while the model runs."""
    return any(isinstance(hook, InputRotation) for hook in layer._forward_pre_hooks.values())
