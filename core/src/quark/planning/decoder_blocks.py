"""Decoder blocks of a model: those that its architecture names, or the whole model as one block."""

from __future__ import annotations

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.errors import ConfigError

__all__ = ["Block", "decoder_blocks"]


@attrs.frozen(eq=False)
class Block:
    """One decoder block, or the whole model.

    Attributes:
        name: Full name of the module; empty where the block is the whole model.
        module: The module itself.
    """

    name: str
    module: nn.Module

    @property
    def prefix(self) -> str:
        """What the full names of the modules inside begin with; empty where the block is the whole model."""
        return f"{self.name}." if self.name else ""

    def owns(self, layer: str) -> bool:
        """Return whether the layer with that full name is in this block."""
        return layer.startswith(self.prefix)


def decoder_blocks(model: nn.Module, architecture: Architecture | None) -> list[Block]:
    """Return the blocks of ``model`` in order; one block, the model itself, where the architecture is not known or names no blocks.

    Raises:
        ConfigError: The architecture names a list that the model does not have.
    """
    if architecture is None or architecture.decoder_blocks is None:
        return [Block("", model)]
    try:
        block_list = model.get_submodule(architecture.decoder_blocks)
    except AttributeError:
        raise ConfigError(
            f"the template '{architecture.model_type}' says that decoder blocks are at '{architecture.decoder_blocks}', but this "
            f"{type(model).__name__} has no such module. Use the template of the model's own config.model_type"
        ) from None
    return [Block(f"{architecture.decoder_blocks}.{name}", block) for name, block in block_list.named_children()]
