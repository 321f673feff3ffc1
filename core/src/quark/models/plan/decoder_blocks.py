"""Functions that find the blocks of a model's decoder and encoder.

The architecture of the model names the blocks. If it names no blocks, the whole model is one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.errors import ConfigError
from quark.models.plan.plan_row import PlanRow


@attrs.frozen(eq=False)
class Block:
    """One block of a decoder or an encoder, or the whole model.

    Attributes:
        name: Full name of the block's module. It is ``""`` if the block is the whole model.
        module: The module of the block.
    """

    name: str
    module: nn.Module

    @property
    def prefix(self) -> str:
        """The prefix of the names of modules in the block. It is ``""`` if the block is the whole model."""
        return f"{self.name}." if self.name else ""

    def owns(self, layer: str) -> bool:
        """Return whether the layer with the full name ``layer`` is in this block."""
        return layer.startswith(self.prefix)


def decoder_blocks(model: nn.Module, architecture: Architecture | None) -> list[Block]:
    """Return the blocks of ``model``, in the order in which they run.

    The blocks of an encoder precede the blocks of its decoder. The model itself is the only block if the
    architecture is unknown or names no blocks, or if a list of blocks contains one module several times.

    Raises:
        ConfigError: The architecture names a list of blocks that the model does not have.
    """
    if architecture is None or not architecture.block_lists:
        return [Block("", model)]
    blocks: list[Block] = []
    for list_name in architecture.block_lists:
        try:
            block_list = model.get_submodule(list_name)
        except AttributeError:
            raise ConfigError(
                f"the template '{architecture.model_type}' says that blocks are at '{list_name}', but this {type(model).__name__} has no "
                "such module. Use the template of the model's own config.model_type, or a template that names modules of this model"
            ) from None
        if len(set(block_list.children())) < len(block_list._modules):
            return [Block("", model)]
        blocks += [Block(f"{list_name}.{name}", block) for name, block in block_list.named_children()]
    return blocks


def rows_by_block(blocks: Sequence[Block], rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """Return a list of rows for each block, in the order of ``blocks``.

    Layers outside all blocks are left out.
    """
    number = {block.name: i for i, block in enumerate(blocks)}
    inside: list[list[PlanRow]] = [[] for _ in blocks]
    for row in rows:
        if (i := next((number[name] for name in owners(row.name) if name in number), None)) is not None:
            inside[i].append(row)
    return inside


def owners(name: str) -> Iterator[str]:
    """Yield the full names of the modules that contain the module ``name``.

    The innermost module comes first. The last one is the model itself, whose name is ``""``.

    >>> list(owners("layers.0.mlp"))
    ['layers.0', 'layers', '']
    """
    while name:
        name = name.rpartition(".")[0]
        yield name
