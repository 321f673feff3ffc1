"""Rotation as a transform: R1 and R2 folded into the weights. Plumbing between the pipeline and `quark_algos.rotate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from quark.algorithms import BlockAtHand, Figures, Rounding, Statistic
from quark.errors import UnsupportedError
from quark.log import get_logger
from quark.specs.algorithm import AlgoConfig
from quark.specs.architecture import Architecture
from quark_algos.rotate import folding
from quark_algos.rotate.hadamard import Rotation
from quark_algos.rotation import RotationConfig

_NOT_OFFERED = ("r3", "r4", "online_r1_rotation", "online_config", "trainable", "train_smooth")
_SEEDS = {"r1": 0, "r2": 1}


class Rotate:
    """Rotates the residual stream (R1) and attention's values (R2); both are part of the weights afterwards, and cost nothing at run time.

    Whether a rotation does good depends on the format: block formats such as MXFP4 live on blocks of like values, which a rotation of the
    full width mixes. It is folded before anything is calibrated, and cannot be taken back block by block, so that nothing judges it here;
    that is said in a warning.

    Args:
        settings: A `RotationConfig`.

    Raises:
        UnsupportedError: It asks for rotations that run with the model, or are learnt.
    """

    stage = "rotation"
    needs: ClassVar[Sequence[type[Statistic]]] = ()
    works_by_block = False

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, RotationConfig)
        asked = [name for name in _NOT_OFFERED if getattr(settings, name)]
        if asked:
            raise UnsupportedError(
                f"rotation with {', '.join(asked)} is not offered: only what can be folded into weights is, r1 and r2. Leave the rest out"
            )
        self._settings = settings
        self._r1: Rotation | None = None
        self._heads = 1

    def outside(self, model: nn.Module, architecture: Architecture) -> None:
        """Rotate embeddings and head; the head gets a weight of its own."""
        config: Any = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._heads = int(text.num_attention_heads)
        settings = self._settings
        if settings.r1:
            seed = _SEEDS["r1"] if settings.random_r1 else None
            self._r1 = folding.r1_of(int(text.hidden_size), architecture, settings.rotation_size, seed)
            folding.outside(model, architecture, self._r1)
        get_logger(__name__).warning(
            "The model is rotated before it is calibrated, and nothing here judges whether that does good: compare with a run without "
            "rotation, above all for formats whose blocks share a scale."
        )

    @torch.no_grad()
    def apply(self, block: BlockAtHand) -> Mapping[str, Figures]:
        """As `quark.algorithms.Transform.apply`."""
        if self._r1 is not None:
            folding.block(block.module, block.architecture, self._r1)
        if not self._settings.r2:
            return {block.name: {"r1": self._settings.r1, "r2": False}}
        value = block.architecture.attention_value
        width = None if value is None else int(getattr(block.module.get_submodule(value), "out_features", 0))
        reason = self._rotate_values(block, width)
        return {block.name: {"r1": self._settings.r1, "r2": reason is None, **({} if reason is None else {"r2_reason": reason})}}

    def _rotate_values(self, block: BlockAtHand, width: int | None) -> str | None:
        """R2; the reason why not, where that is so."""
        output = block.architecture.attention_output
        if not width or output is None:
            return "attention has no projection of values alone"
        head = int(getattr(block.module.get_submodule(output), "in_features", 0)) // self._heads
        rotation = Rotation.of(head, None, _SEEDS["r2"] if self._settings.random_r2 else None)
        return folding.values(block.module, block.architecture, rotation, self._heads)

    def rounding(self) -> Rounding | None:
        """Round-to-nearest."""
        return None
