"""Online rotations in a checkpoint. The functions store the matrices of rotations, and restore rotations when
a checkpoint is loaded.

A checkpoint has one matrix per size, ``shared_input_rotation_<size>``. It is an int8 tensor ``[size, size]``
with values 1 and -1, and it is a buffer of the whole model. AMD Quark 0.13 writes and reads this layout. AMD
Quark also reads an older layout with one matrix per layer, ``<layer>.input_rotation``. quark multiplies
inputs by the small factors of the matrix and does not need the matrix itself. The first forward pass of a
loaded model compares the stored matrix with the product of these factors. If they differ, the model uses the
stored matrix.
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
    """Restores the rotations of a checkpoint (a `quark.checkpoint.restorers.Restorer`).

    Args:
        settings: The `RotationConfig` of the checkpoint.

    Raises:
        UnsupportedError: The rotations of the checkpoint were learned, or inputs are scaled before they are
            rotated.
    """

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, RotationConfig)
        refused = settings.refused()
        if refused:
            raise UnsupportedError(f"a model rotated with {', '.join(refused)} cannot be loaded here. Export it without these options")
        self._settings = settings

    def restore(self, model: nn.Module, config: QConfig) -> None:
        """Install the rotations in a model. See `quark.checkpoint.restorers.Restorer.restore`."""
        rotations: dict[int, InputRotation] = {}
        for name in self._layers(model, config):
            try:
                layer = model.get_submodule(name)
                width = linear_weight(layer).shape[1]
            except (AttributeError, IndexError):
                raise CheckpointError(f"the checkpoint rotates the input of the layer '{name}', but this model has no such layer") from None
            size = block_size(self._settings, name, width)
            install(layer, rotations.setdefault(size, InputRotation(size)))
        if rotations:
            expect_matrices(model, rotations)
        if self._settings.r3:
            rows = plan_rows(model, config)
            attentions = attention_rows(model, rows, config, architecture_of(model))
            rotate_heads(model, rotated_attentions(model, attentions, rows))

    def place_of(self, name: str, tensor: Tensor) -> str:
        """Return the name in the model of a tensor of the checkpoint. See
        `quark.checkpoint.restorers.Restorer.place_of`.
        """
        is_of_a_layer = (
            name.endswith(_OF_A_LAYER) and tensor.ndim == 2
        )  # the older form has a matrix per layer, the model a matrix per size
        return buffer_name(len(tensor)) if is_of_a_layer else name

    def _layers(self, model: nn.Module, config: QConfig) -> Iterator[str]:
        online = self._settings.online_config
        if online is not None and online.online_rotation_layers is not None:
            yield from online.online_rotation_layers
        elif self._settings.online_r1_rotation and self._settings.r1:
            raise CheckpointError(
                "the checkpoint uses online_r1_rotation but does not name the layers. Add online_rotation_layers to its config"
            )
        elif self._settings.r4:
            # Layers are found by the last part of their name. AMD Quark 0.13 does the same if there is no
            # list.
            for name, layer in model.named_modules():
                kind = counts_as(layer)
                if name.endswith("down_proj") and kind is not None and layer_config_for(config, name, kind).config is not None:
                    yield name


_OF_A_LAYER = ".input_rotation"
_PROBES = 8
"""Number of random vectors with which a matrix is tested."""
_ROWS = 1024
"""Number of rows of a matrix that are converted to float64 at a time. This limits the memory that is
needed.
"""


def buffer_name(size: int) -> str:
    """Return the name of the matrix ``[size, size]``. The name is the same in the model and in the
    checkpoint.
    """
    return f"shared_input_rotation_{size}"


def keep_matrices(model: nn.Module, sizes: set[int]) -> None:
    """Register the matrices of the given sizes as buffers of a model, so that they are exported with the
    model.

    The buffers are on the model's device.
    """
    device = next(
        (p.device for p in model.parameters() if not p.is_meta), torch.device("cpu")
    )  # parameters of blocks may be on the meta device
    for size in sorted(sizes):
        model.register_buffer(buffer_name(size), matrix_of(size).to(device))


def expect_matrices(model: nn.Module, rotations: Mapping[int, InputRotation]) -> None:
    """Register buffers on the meta device. The matrices of a checkpoint will be loaded into these buffers.

    A hook checks the matrices before the first forward pass.

    Args:
        model: The whole model, before tensors are loaded.
        rotations: A dictionary from block size to rotation. All layers with the same block size share one
            rotation.
    """
    for size in rotations:
        model.register_buffer(buffer_name(size), torch.zeros(size, size, dtype=torch.int8, device="meta"))
    model.register_forward_pre_hook(_Arrived(dict(rotations)), prepend=True)


class _Arrived:
    """A forward pre-hook of the model. It checks the loaded matrices before the first forward pass.

    If a loaded matrix differs from the matrix of a rotation, the rotation uses the loaded matrix from then
    on.
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
    """Check that a loaded matrix is a Hadamard matrix, and return it in float32.

    Raises:
        CheckpointError: The matrix is not a Hadamard matrix. One possible cause is that the tensor is missing
            in the checkpoint: if the loader only logs a warning, the matrix is uninitialized memory.
    """
    float_matrix = matrix.float()
    # M Mᵀ = size · I is tested on random vectors of integers, so that sums are exact. The sums of the second
    # product need float64.
    some = torch.randint(-1, 2, (size, _PROBES), generator=torch.Generator().manual_seed(0)).to(float_matrix)
    once = (float_matrix.t() @ some).double()
    back = torch.cat([rows.double() @ once for rows in float_matrix.split(_ROWS)])
    if not (bool(matrix.abs().eq(1).all()) and torch.equal(back, size * some.double())):
        raise CheckpointError(
            f"the Hadamard matrix '{buffer_name(size)}' of the checkpoint is missing or wrong. Load the checkpoint with "
            f"import_model_from_safetensors for details, or export it again"
        )
    return float_matrix
