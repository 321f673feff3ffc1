"""Turn what a loader has filled into the quantized modules that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from quark.errors import CheckpointError
from quark.models.layers.packed_layers import Packed

__all__ = ["unpack_all"]


def unpack_all(model: nn.Module, directory: Path, chosen: Callable[[str], bool] = lambda _: True) -> None:
    """Replace every `Packed` module of a model by what it stands for, in place; of chosen names only, where a choice is given.

    Raises:
        CheckpointError: A stored scale is not valid; the message names the directory and the layer.
    """
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Packed) and chosen(name):
            try:
                model.set_submodule(name, layer.unpack())
            except CheckpointError as error:
                raise CheckpointError(f"'{directory}' cannot be used: {error}") from error
