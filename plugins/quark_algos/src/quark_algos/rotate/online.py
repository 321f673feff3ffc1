"""Rotations that run with the model: of a layer's input, such as R4 before the MLP's output projection, undone in the layer's weight."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark_algos.rotate.hadamard import Rotation
from quark_algos.smooth.places import input_axis

CHILD = "input_rotation"
"""By what name a layer holds the rotation of its input."""


class OnlineRotation(nn.Module):
    """``x · R`` for the last axis, in float32, or float64 where ``x`` is, and rounded once.

    Args:
        rotation: R.

    Attributes:
        signs: Those of R, ``[width]``, int8, a buffer that is stored with the model; ones where R has none.
        block: Order of the Hadamard matrix, int64, a scalar buffer that is stored too.
        keeps_mean: Which form R has, bool, likewise.
    """

    signs: Tensor
    block: Tensor
    keeps_mean: Tensor

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        signs = torch.ones(rotation.width, dtype=torch.int8) if rotation.signs is None else rotation.signs.clone()
        self.register_buffer("signs", signs)
        self.register_buffer("block", torch.tensor(rotation.block))
        self.register_buffer("keeps_mean", torch.tensor(rotation.keeps_mean))
        self._rotation = rotation

    @classmethod
    def of_width(cls, width: int) -> Self:
        """One to load a state into: of that width, without signs, as if nothing were stored."""
        return cls(Rotation.of(width))

    def forward(self, x: Tensor) -> Tensor:
        """``[…, width]``, of the dtype of ``x`` ``[…, width]``."""
        return self._rotation.apply(x)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._rotation = Rotation(len(self.signs), int(self.block), self.signs.cpu().clone(), bool(self.keeps_mean))

    def extra_repr(self) -> str:
        return f"width={self._rotation.width}, block={self._rotation.block}"


@torch.no_grad()
def rotate_input(layer: nn.Module, rotation: Rotation) -> OnlineRotation:
    """Fold R into a layer's weight, and rotate its input by R from now on; the layer computes what it did.

    The weight is made anew, ``W · R``, computed in float32, or float64 where it is that, and rounded once. The layer holds the rotation by
    the name `CHILD`, and applies it in a hook before its forward.

    Args:
        layer: A linear one, or one of those that keep the weight transposed.
        rotation: Of the width of the layer's input.

    Returns:
        What rotates the input.

    Raises:
        ConfigError: The layer's input is rotated already, or has another width.
    """
    if isinstance(getattr(layer, CHILD, None), OnlineRotation):
        raise ConfigError("the input of this layer is rotated already; rotate it once")
    old, transposed = layer.get_parameter("weight"), input_axis(layer) == 0
    new = rotation.apply(old.t()).t() if transposed else rotation.apply(old)
    layer.weight = nn.Parameter(new.contiguous(), requires_grad=old.requires_grad)
    return install(layer, OnlineRotation(rotation))


def install(layer: nn.Module, online: OnlineRotation) -> OnlineRotation:
    """Rotate a layer's input from now on, and leave its weight as it is: it is that for a rotated input already."""
    layer.register_module(CHILD, online)
    layer.register_forward_pre_hook(_rotate_first)
    return online


def _rotate_first(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    # By the layer's own attribute: copies of the layer have copies of it.
    return (layer.get_submodule(CHILD)(args[0]), *args[1:])
