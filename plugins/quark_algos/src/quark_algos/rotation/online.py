"""Online rotations of a layer's input, such as R4 before the MLP's output projection, and their matrices.

The layer's weight has the inverse folded in. A matrix has the form of AMD Quark 0.13: the Kronecker product
of a small one and Sylvester's of a power of two, ``A ⊗ S``, with the smallest possible order of A. To rotate
all channels at once, AMD Quark 0.13 uses its own matrix, not the checkpoint's. The outputs are equal if both
tables agree, as they do for powers of two and for 2^k times 12, 20, 28, 36, 60, 108 and 140.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark_algos.mappings.resolve import input_axis
from quark_algos.rotation.hadamard import LARGEST_FACTOR, Rotation, factors_of, transform
from quark_algos.rotation.paley import as_published, has_order

__all__ = ["InputRotation", "base_order", "install", "is_own", "is_rotated", "matrix_of", "product", "rotate_input"]


_ROWS = 1024
"""Rows of a matrix that are computed at a time, to bound memory."""


def product(x: Tensor, size: int) -> Tensor:
    """Return ``x · M`` for the matrix M of that size, not normalized.

    Args:
        x: ``[…, size]``, float32 or float64.
        size: Order of a Hadamard matrix that is known here.

    Returns:
        ``[…, size]``, a new tensor of the dtype of ``x``, on its device.

    Raises:
        ConfigError: No Hadamard matrix of that order is known here.
    """
    base = base_order(size)
    if base == 1 or base is None:
        return transform(x, size)
    by_base = transform(x.unflatten(-1, (base, size // base)), size // base)
    return (_small(base, x.dtype, str(x.device)).t() @ by_base).flatten(-2)


@cache
def base_order(size: int) -> int | None:
    """Return the order of A; 1 if M is Sylvester's.

    None if M is a product of several small matrices, in the order of `factors_of`.
    """
    twos = size & -size
    odd = size // twos
    if odd == 1:
        return 1
    if size % 40 == 0 and odd == 5:
        return 40
    orders = (odd * 2**power for power in range(2, twos.bit_length()))
    return next((m for m in orders if m <= LARGEST_FACTOR and has_order(m)), None)


def matrix_of(size: int) -> Tensor:
    """Return M, ``[size, size]``, int8, each value 1 or -1, on the CPU; raises as `product`."""
    matrix = torch.empty(size, size, dtype=torch.int8)
    for start in range(0, size, _ROWS):
        matrix[start : start + _ROWS] = _rows(size, start, matrix.device)
    return matrix


def is_own(matrix: Tensor) -> bool:
    """Return whether a matrix is `matrix_of` its size.

    The matrices are compared in parts, so that memory for a second matrix is not needed.
    """
    size = len(matrix)
    parts = range(0, size, _ROWS)
    return factors_of(size) is not None and all(
        torch.equal(matrix[start : start + _ROWS], _rows(size, start, matrix.device)) for start in parts
    )


def _rows(size: int, start: int, device: torch.device) -> Tensor:
    count = min(_ROWS, size - start)
    unit = torch.zeros(count, size, dtype=torch.float32, device=device)
    unit[torch.arange(count), start + torch.arange(count)] = 1
    return product(unit, size).to(torch.int8)


@cache
def _small(order: int, dtype: torch.dtype, device: str) -> Tensor:
    return as_published(order).to(device=device, dtype=dtype)


class InputRotation:
    """A forward pre-hook that replaces a layer's input ``x`` by ``x · R``.

    R has the diagonal blocks ``M / √size``, M of +1 and -1.

    All layers of a model with the same block size share one instance, whatever their width. It is no module:
    the layer keeps its children and tensors, and is quantized like any other.

    Args:
        size: Block size; order of a known Hadamard matrix.

    Attributes:
        transforms_input: Marks the hook for `quark.algorithms.input_is_transformed`.
        size: Block size.
        matrix: M, ``[size, size]``, float32, on any device, if it differs from the matrix of
            `quark_algos.rotation.online`; otherwise None.

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
        raise ConfigError("the input of this layer is rotated already: rotate it once")
    old, transposed = layer.get_parameter("weight"), input_axis(layer) == 0
    new = rotation.apply(old.t()).t() if transposed else rotation.apply(old)
    layer.weight = nn.Parameter(new.contiguous(), requires_grad=old.requires_grad)
    install(layer, rotation)


def install(layer: nn.Module, rotation: InputRotation) -> None:
    """Install the rotation of a layer's input. The layer's weight already expects the rotated input.

    The hook is the first, so that all other hooks see the rotated input.
    """
    layer.register_forward_pre_hook(rotation, prepend=True)


def is_rotated(layer: nn.Module) -> bool:
    """Return whether a layer's input is rotated while the model runs."""
    return any(isinstance(hook, InputRotation) for hook in layer._forward_pre_hooks.values())
