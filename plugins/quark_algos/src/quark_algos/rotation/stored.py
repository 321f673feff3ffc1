"""Matrices of online rotations in a checkpoint: one per size, ``shared_input_rotation_<size>``.

A matrix is ``[size, size]``, int8, each value 1 or -1, a buffer of the whole model. Source: checkpoints of
AMD Quark 0.13, which reads this form, and the older form with a matrix per layer, ``<layer>.input_rotation``.
This project computes rotations from factors without the matrix; when a loaded model runs for the first time
and its matrix differs, the matrix of the checkpoint is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quark.errors import CheckpointError
from quark_algos.rotation.online import InputRotation
from quark_algos.rotation.online_matrix import is_own, matrix_of

__all__ = ["buffer_name", "expect", "keep", "place_of"]

_OF_A_LAYER = ".input_rotation"
_PROBES = 8
"""Random vectors that a matrix is tested with."""
_ROWS = 1024
"""Rows of a matrix that are converted to float64 at a time, to bound memory."""


def buffer_name(size: int) -> str:
    """Return the name of the matrix of that size in the model and in its checkpoint."""
    return f"shared_input_rotation_{size}"


def place_of(name: str, tensor: Tensor) -> str:
    """Return the name in the model of a checkpoint tensor: the matrix of a layer becomes that of its size."""
    return buffer_name(len(tensor)) if name.endswith(_OF_A_LAYER) and tensor.ndim == 2 else name


def keep(model: nn.Module, sizes: set[int]) -> None:
    """Register the matrices of these sizes as buffers of a model that is going to be exported, on its device."""
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))  # blocks may be on the meta device
    for size in sorted(sizes):
        model.register_buffer(buffer_name(size), matrix_of(size).to(device))


def expect(model: nn.Module, rotations: Mapping[int, InputRotation]) -> None:
    """Register meta buffers for the matrices of a checkpoint, and a hook that checks them before the first forward.

    Args:
        model: The whole model, before tensors are loaded.
        rotations: The rotation of all layers with a block size, by size.
    """
    for size in rotations:
        model.register_buffer(buffer_name(size), torch.zeros(size, size, dtype=torch.int8, device="meta"))
    model.register_forward_pre_hook(_Arrived(dict(rotations)), prepend=True)


class _Arrived:
    """A forward pre-hook of the model: at the first forward, rotations use loaded matrices that differ from their own."""

    def __init__(self, rotations: dict[int, InputRotation]) -> None:
        self._waiting = rotations

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        while self._waiting:
            size, rotation = next(iter(self._waiting.items()))
            matrix = model.get_buffer(buffer_name(size))
            if not is_own(matrix):
                rotation.matrix = _checked(matrix, size)
            del self._waiting[size]


def _checked(matrix: Tensor, size: int) -> Tensor:
    """Return a loaded matrix in float32.

    Raises:
        CheckpointError: The matrix is no Hadamard matrix: a loader that only warns of missing tensors leaves
            uninitialized memory.
    """
    float_matrix = matrix.float()
    # M Mᵀ = size · I is tested on random vectors of integers, whose sums are exact; those of the second
    # product need float64.
    some = torch.randint(-1, 2, (size, _PROBES), generator=torch.Generator().manual_seed(0)).to(float_matrix)
    once = (float_matrix.t() @ some).double()
    back = torch.cat([rows.double() @ once for rows in float_matrix.split(_ROWS)])
    if not (bool(matrix.abs().eq(1).all()) and torch.equal(back, size * some.double())):
        raise CheckpointError(
            f"the checkpoint lacks '{buffer_name(size)}', or holds another thing by that name than a Hadamard matrix, without which "
            "inputs cannot be rotated: load it with import_model_from_safetensors, which says which, or make it again"
        )
    return float_matrix
