"""Parts of transforms that are careless: a transform that moves scale inherits one of them first."""

from __future__ import annotations

from typing import Any

from torch import nn

from quark.algorithms import BlockContext

__all__ = ["DividesByZero", "WantsGradients"]


class WantsGradients:
    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        super().move(norm, readers, block)  # type: ignore[misc]
        norm.weight.requires_grad_(True)  # type: ignore[operator, union-attr]


class DividesByZero:
    """Makes all rows of ``up_proj`` equally large, also those of zeros."""

    def move(self, norm: nn.Module, readers: list[nn.Module], block: BlockContext) -> None:
        super().move(norm, readers, block)  # type: ignore[misc]
        up: Any = block.module.get_submodule(block.architecture.mlp_value or "")
        down: Any = block.module.get_submodule(block.architecture.mlp_output or "")
        if len(up.weight) != down.weight.shape[1]:
            return  # it is fused with another
        size = up.weight.abs().amax(1)
        up.weight = nn.Parameter(up.weight / size[:, None], requires_grad=False)
        down.weight = nn.Parameter(down.weight * size, requires_grad=False)
        if up.bias is not None:
            up.bias = nn.Parameter(up.bias / size, requires_grad=False)
