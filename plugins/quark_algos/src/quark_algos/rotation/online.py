"""Online rotations of a layer's input, such as R4 before the MLP's output projection; the layer's weight has the inverse folded in."""

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
    """A forward pre-hook that replaces a layer's input ``x`` by ``x · R``; R has the diagonal blocks ``M / √size``, M of +1 and -1.

    All layers of a model with the same block size share one instance, whatever their width. It is no module:
    the layer keeps its children and tensors, and is quantized like any other.

    Args:
        size: Block size; order of a known Hadamard matrix.

    Attributes:
        transforms_input: Marks the hook for `quark.algorithms.input_is_transformed`.
        size: Block size.
        matrix: M, ``[size, size]``, float32, on any device, if it differs from that of
            `quark_algos.rotation.online_matrix`; else None.

    Raises:
        ConfigError: No Hadamard matrix of that order is known here.
    """

    transforms_input: ClassVar[bool] = True

    def __init__(self, size: int) -> None:
        Rotation(size, size)
        self.size = size
        self.matrix: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Return ``x · R`` along the last axis, computed in float32 (float64 if ``x`` is) and rounded once.

        Args:
            x: ``[…, width]``, of a floating dtype; the size divides the width.

        Returns:
            A new tensor with the shape, dtype and device of ``x``.

        Raises:
            ConfigError: The size does not divide the width.
        """
        Rotation(x.shape[-1], self.size)  # raises if the size does not divide the width
        master = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32).unflatten(-1, (-1, self.size))
        rotated = product(master, self.size) if self.matrix is None else master @ self.matrix.to(device=x.device, dtype=master.dtype)
        return (rotated / self.size**0.5).flatten(-2).to(x.dtype)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Rotate the first argument; signature of a torch forward pre-hook."""
        return (self.apply(args[0]), *args[1:])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size})"


@torch.no_grad()
def rotate_input(layer: nn.Module, rotation: InputRotation) -> None:
    """Fold R into a layer's weight and install the rotation of its input; the layer's output stays.

    A new weight, ``W · R``, is computed in float32 (float64 if it is float64) and rounded once.

    Args:
        layer: A linear layer, or one with a transposed weight.
        rotation: The rotation; its size divides the width of the layer's input.

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
    """Install the rotation of a layer's input; the weight is already that for a rotated input.

    The hook is the first, so that all other hooks see the rotated input.
    """
    layer.register_forward_pre_hook(rotation, prepend=True)


def is_rotated(layer: nn.Module) -> bool:
    """Return whether a layer's input is rotated while the model runs."""
    return any(isinstance(hook, InputRotation) for hook in layer._forward_pre_hooks.values())
