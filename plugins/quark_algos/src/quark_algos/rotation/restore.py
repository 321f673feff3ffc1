"""Restores online rotations on a float model when a checkpoint is read."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.errors import CheckpointError, UnsupportedError
from quark.models.layers.quantized_layers import counts_as, linear_weight
from quark.models.plan.attention import attention_rows
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import plan_rows
from quark.models.plan.rules import layer_config_for
from quark_algos.rotation import stored
from quark_algos.rotation.choice import block_size, rotate_heads, rotated_attentions
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.online import InputRotation, install

__all__ = ["RestoreRotations"]


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
            raise UnsupportedError(f"a model that was rotated with {', '.join(refused)} is not read")
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
            stored.expect(model, rotations)
        if self._settings.r3:
            rows = plan_rows(model, config)
            attentions = attention_rows(model, rows, config, architecture_of(model))
            rotate_heads(model, rotated_attentions(model, attentions, rows))

    def place_of(self, name: str, tensor: Tensor) -> str:
        """As `quark.checkpoint.restorers.Restorer.place_of`."""
        return stored.place_of(name, tensor)

    def _layers(self, model: nn.Module, config: QConfig) -> Iterator[str]:
        online = self._settings.online_config
        if online is not None and online.online_rotation_layers is not None:
            yield from online.online_rotation_layers
        elif self._settings.online_r1_rotation and self._settings.r1:
            raise CheckpointError("the checkpoint was made with online_r1_rotation, and does not name the layers (online_rotation_layers)")
        elif self._settings.r4:
            # By the last part of the name, as AMD Quark 0.13 does without a list.
            for name, layer in model.named_modules():
                kind = counts_as(layer)
                if name.endswith("down_proj") and kind is not None and layer_config_for(config, name, kind).config is not None:
                    yield name
