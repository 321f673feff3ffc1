"""Turn what transformers or our reader has loaded of an export into quantized layers."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from quark.errors import CheckpointError
from quark.modules.packed_layers import PackedLayer
from quark.modules.packed_quantizer import PackedQuantizer


def unpack_all(model: nn.Module, directory: Path) -> None:
    """Replace every packed layer and quantizer of a model by what it stands for, in place.

    Raises:
        CheckpointError: A stored scale is none; the message names the directory and the layer.
    """
    for name, layer in list(model.named_modules()):
        if isinstance(layer, PackedLayer | PackedQuantizer):
            try:
                model.set_submodule(name, layer.unpack())
            except CheckpointError as error:
                raise CheckpointError(f"'{directory}' cannot be used: {error}") from error
