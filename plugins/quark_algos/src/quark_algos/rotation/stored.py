"""Matrices of rotations that run with the model, as a checkpoint holds them: one for each size, ``shared_input_rotation_<size>``.

It is ``[size, size]``, int8, each value 1 or -1, a buffer of the whole model. Source: AMD Quark 0.13, which reads this form, and the older
one, in which each layer has its own by the name of ``<layer>.input_rotation``. What is computed here needs no matrix but for its factors;
when a model that was read runs for the first time, the matrix that came with it decides.
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
_PROBES, _ROWS = 8, 1024


def buffer_name(size: int) -> str:
    """Name of the matrix of that size in the whole model and in its checkpoint."""
    return f"shared_input_rotation_{size}"


def place_of(name: str, tensor: Tensor) -> str:
    """Where a checkpoint tensor goes: the matrix of a layer is that of its size."""
    return buffer_name(len(tensor)) if name.endswith(_OF_A_LAYER) and tensor.ndim == 2 else name


def keep(model: nn.Module, sizes: set[int]) -> None:
    """Let a model that is going to be exported hold the matrices of these sizes, where its other tensors are."""
    device = next(model.parameters()).device
    for size in sorted(sizes):
        model.register_buffer(buffer_name(size), matrix_of(size).to(device))


def expect(model: nn.Module, rotations: Mapping[int, InputRotation]) -> None:
    """Make places for the matrices of a checkpoint, and look at them before the first forward.

    Args:
        model: The whole model, before tensors are loaded.
        rotations: By size; all layers of the model that are rotated in blocks of that size have this one.
    """
    for size in rotations:
        model.register_buffer(buffer_name(size), torch.zeros(size, size, dtype=torch.int8, device="meta"))
    model.register_forward_pre_hook(_Arrived(dict(rotations)), prepend=True)


class _Arrived:
    """A hook before the model's forward: the first time, rotations take the matrices that were loaded, where they are not their own."""

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
    """A matrix in float32.

    Raises:
        CheckpointError: It is no Hadamard matrix: a loader that only warns of missing tensors leaves what was in memory.
    """
    made = matrix.float()
    # Some vectors of integers show it, for which all sums are exact, those of the second product in float64.
    some = torch.randint(-1, 2, (size, _PROBES), generator=torch.Generator().manual_seed(0)).to(made)
    once = (made.t() @ some).double()
    back = torch.cat([rows.double() @ once for rows in made.split(_ROWS)])
    if not (bool(matrix.abs().eq(1).all()) and torch.equal(back, size * some.double())):
        raise CheckpointError(
            f"the checkpoint lacks '{buffer_name(size)}', or holds another thing by that name than a Hadamard matrix, without which "
            "inputs cannot be rotated: load it with import_model_from_safetensors, which says which, or make it again"
        )
    return made
