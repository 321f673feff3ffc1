"""Online rotations in a checkpoint: their matrices, and the rotations put back when a checkpoint is read.

There is one matrix per size, ``shared_input_rotation_<size>``, ``[size, size]``, int8, each value 1 or -1, a
buffer of the whole model. Source: checkpoints of AMD Quark 0.13, which reads this form, and the older form
with a matrix per layer, ``<layer>.input_rotation``. quark computes a rotation from factors, without its
matrix. The first forward of a loaded model compares the factors with the stored matrix. If they differ, the
model uses the stored matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.errors import CheckpointError, UnsupportedError
from quark.models.layers.quantized_layers import counts_as, linear_weight
from quark.models.plan.attention import attention_rows
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import plan_rows
from quark.models.plan.rules import layer_config_for
from quark_algos.rotation.choice import block_size, rotate_heads, rotated_attentions
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.online import InputRotation, install, is_own, matrix_of

__all__ = ["RestoreRotations", "buffer_name", "expect_matrices", "keep_matrices"]


class RestoreRotations:
    """The `quark.checkpoint.restorers.Restorer` of rotations.

    Args:
        settings: The `RotationConfig` of a checkpoint.

    Raises:
        UnsupportedError: The rotations were learned, or inputs are scaled before they are rotated.
    """

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, RotationConfig)
        refused = settings.refused()
        if refused:
            raise UnsupportedError(f"a model rotated with {', '.join(refused)} cannot be loaded here: export it without these rotations")
        self._settings = settings

    def restore(self, model: nn.Module, config: QConfig) -> None:
        """As `quark.checkpoint.restorers.Restorer.restore`."""
        rotations: dict[int, InputRotation] = {}
        for name in self._layers(model, config):
            try:
                layer = model.get_submodule(name)
                width = linear_weight(layer).shape[1]
            except (AttributeError, IndexError):
                raise CheckpointError(f"the checkpoint rotates the input of '{name}', which this model does not have") from None
            size = block_size(self._settings, name, width)
            install(layer, rotations.setdefault(size, InputRotation(size)))
        if rotations:
            expect_matrices(model, rotations)
        if self._settings.r3:
            rows = plan_rows(model, config)
            attentions = attention_rows(model, rows, config, architecture_of(model))
            rotate_heads(model, rotated_attentions(model, attentions, rows))

    def place_of(self, name: str, tensor: Tensor) -> str:
        """As `quark.checkpoint.restorers.Restorer.place_of`."""
        is_of_a_layer = name.endswith(_OF_A_LAYER) and tensor.ndim == 2  # one matrix per layer becomes one per size
        return buffer_name(len(tensor)) if is_of_a_layer else name

    def _layers(self, model: nn.Module, config: QConfig) -> Iterator[str]:
        online = self._settings.online_config
        if online is not None and online.online_rotation_layers is not None:
            yield from online.online_rotation_layers
        elif self._settings.online_r1_rotation and self._settings.r1:
            raise CheckpointError(
                "the checkpoint uses online_r1_rotation but does not name its layers: add online_rotation_layers to its config"
            )
        elif self._settings.r4:
            # By the last part of the name, as AMD Quark 0.13 does without a list.
            for name, layer in model.named_modules():
                kind = counts_as(layer)
                if name.endswith("down_proj") and kind is not None and layer_config_for(config, name, kind).config is not None:
                    yield name


_OF_A_LAYER = ".input_rotation"
_PROBES = 8
"""Random vectors that a matrix is tested with."""
_ROWS = 1024
"""Rows of a matrix that are converted to float64 at a time, to bound memory."""


def buffer_name(size: int) -> str:
    """Return the name of the matrix of that size in the model and in its checkpoint."""
    return f"shared_input_rotation_{size}"


def keep_matrices(model: nn.Module, sizes: set[int]) -> None:
    """Register the matrices of these sizes as buffers of a model that is going to be exported.

    They are on its device.
    """
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))  # blocks may be on the meta device
    for size in sorted(sizes):
        model.register_buffer(buffer_name(size), matrix_of(size).to(device))


def expect_matrices(model: nn.Module, rotations: Mapping[int, InputRotation]) -> None:
    """Register meta buffers for the matrices of a checkpoint.

    A hook checks them before the first forward.

    Args:
        model: The whole model, before tensors are loaded.
        rotations: The rotation of all layers with a block size, by size.
    """
    for size in rotations:
        model.register_buffer(buffer_name(size), torch.zeros(size, size, dtype=torch.int8, device="meta"))
    model.register_forward_pre_hook(_Arrived(dict(rotations)), prepend=True)


class _Arrived:
    """A forward pre-hook of the model that checks loaded matrices at the first forward.

    Rotations use loaded matrices that differ from their own.
    """

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
    # M Mᵀ = size · I is tested on random vectors of integers, so that sums are exact; the sums of the second
    # product need float64.
    some = torch.randint(-1, 2, (size, _PROBES), generator=torch.Generator().manual_seed(0)).to(float_matrix)
    once = (float_matrix.t() @ some).double()
    back = torch.cat([rows.double() @ once for rows in float_matrix.split(_ROWS)])
    if not (bool(matrix.abs().eq(1).all()) and torch.equal(back, size * some.double())):
        raise CheckpointError(
            f"the Hadamard matrix '{buffer_name(size)}' of the checkpoint is missing or wrong: load it with import_model_from_safetensors "
            f"for details, or export it again"
        )
    return float_matrix
