"""Online rotations: rotations of a layer's input that are computed while the model runs.

An example is R4, which rotates the input of an MLP's output projection.

The inverse rotation is folded into the layer's weight. A rotation matrix has the same structure as in AMD
Quark 0.13. It is the Kronecker product ``A ⊗ S`` of a small matrix A and Sylvester's matrix S. The order of S
is a power of two, and A has the smallest possible order. If a rotation has a single block of all channels,
AMD Quark 0.13 does not read the matrix in the checkpoint, but uses its own matrix. Outputs are equal if both
programs have the same matrix. They have the same matrix for powers of two, and for 2^k times 12, 20, 28, 36,
60, 108 and 140.
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
"""Number of rows of a matrix that are computed at a time. This limits the memory that is needed."""


def product(x: Tensor, size: int) -> Tensor:
    """Return ``x · M``. M is the Hadamard matrix ``[size, size]``, with values 1 and -1.

    Args:
        x: A tensor ``[…, size]``, float32 or float64.
        size: The order of M. This plugin must have a Hadamard matrix of this order.

    Returns: A new tensor ``[…, size]`` with the dtype and device of ``x``.

    Raises:
        ConfigError: This plugin has no Hadamard matrix of this order.
    """
    base = base_order(size)
    if base == 1 or base is None:
        return transform(x, size)
    by_base = transform(x.unflatten(-1, (base, size // base)), size // base)
    return (_small(base, x.dtype, str(x.device)).t() @ by_base).flatten(-2)


@cache
def base_order(size: int) -> int | None:
    """Return the number of rows of the matrix A in ``M = A ⊗ S``, for the Hadamard matrix M ``[size, size]``.

    S is one of Sylvester's matrices, whose sizes are powers of two. The result is 1 if M itself is such a
    matrix. It is None if M is a product of several small matrices (see `factors_of`).
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
    """Return the Hadamard matrix M ``[size, size]`` as an int8 tensor on the CPU. Each value is 1 or -1.

    Raises:
        ConfigError: This plugin has no Hadamard matrix of this order.
    """
    matrix = torch.empty(size, size, dtype=torch.int8)
    for start in range(0, size, _ROWS):
        matrix[start : start + _ROWS] = _rows(size, start, matrix.device)
    return matrix


def is_own(matrix: Tensor) -> bool:
    """Return whether ``matrix`` equals the result of `matrix_of` for the same size.

    The matrices are compared in parts, so that no memory for a second matrix is needed.
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

    R is block-diagonal with the blocks ``M / √size``. M is a Hadamard matrix.

    All layers of a model with the same block size share one instance, even if the layers have different
    widths. The instance is not a module. So the layer gets no new submodules or tensors, and it is quantized
    like any other layer.

    Args:
        size: The block size. This plugin must have a Hadamard matrix of this order.

    Attributes:
        transforms_input: Marks the hook for `quark.algorithms.input_is_transformed`.
        size: The block size.
        matrix: M ``[size, size]``, float32, on any device. It is None if M equals the result of `matrix_of`.

    Raises:
        ConfigError: This plugin has no Hadamard matrix of this order.
    """

    transforms_input: ClassVar[bool] = True

    def __init__(self, size: int) -> None:
        Rotation(size, size)
        self.size = size
        self.matrix: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Return ``x · R`` along the last axis.

        The product is computed in float32 (or in float64 if ``x`` is float64) and rounded once.

        Args:
            x: A tensor ``[…, width]`` with a floating-point dtype. The block size must divide the width.

        Returns:
            A new tensor with the shape, dtype and device of ``x``.

        Raises:
            ConfigError: The block size does not divide the width.
        """
        Rotation(x.shape[-1], self.size)  # raises if the size does not divide the width
        master = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32).unflatten(-1, (-1, self.size))
        rotated = product(master, self.size) if self.matrix is None else master @ self.matrix.to(device=x.device, dtype=master.dtype)
        return (rotated / self.size**0.5).flatten(-2).to(x.dtype)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Rotate the first argument of the layer.

        This method has the signature of a forward pre-hook of torch.
        """
        return (self.apply(args[0]), *args[1:])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size})"


@torch.no_grad()
def rotate_input(layer: nn.Module, rotation: InputRotation) -> None:
    """Fold a rotation R into a layer's weight, and rotate the layer's input. The layer's output does not
    change.

    The new weight, ``W · R``, is computed in float32 (or in float64 if W is float64) and rounded once.

    Args:
        layer: A linear layer. Its weight may be transposed.
        rotation: The rotation. Its block size must divide the width of the layer's input.

    Raises:
        ConfigError: The layer's input is rotated already, or the block size does not divide the width of the
            input.
    """
    if is_rotated(layer):
        raise ConfigError("the input of this layer is rotated already. Rotate it only once")
    old, transposed = layer.get_parameter("weight"), input_axis(layer) == 0
    new = rotation.apply(old.t()).t() if transposed else rotation.apply(old)
    layer.weight = nn.Parameter(new.contiguous(), requires_grad=old.requires_grad)
    install(layer, rotation)


def install(layer: nn.Module, rotation: InputRotation) -> None:
    """Install the rotation of a layer's input. The inverse rotation must already be folded into the layer's
    weight.

    The rotation becomes the layer's first hook, so that all other hooks get the rotated input.
    """
    layer.register_forward_pre_hook(rotation, prepend=True)


def is_rotated(layer: nn.Module) -> bool:
    """Return whether a layer's input is rotated while the model runs."""
    return any(isinstance(hook, InputRotation) for hook in layer._forward_pre_hooks.values())
