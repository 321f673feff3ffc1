"""Sources have the float tensors of a model, block by block. The in-memory source has them all along."""

from __future__ import annotations

from typing import Protocol

from quark.model.blocks import Block


class BlockSource(Protocol):
    """Makes tensors available in the modules of a model, and takes them away again."""

    def load(self, block: Block | None) -> None:
        """The parameters and buffers of a block are about to be used; of None, those that belong to no block."""

    def release(self, block: Block) -> None:
        """Every forward has left the block, and the sink has taken it."""


class InMemorySource:
    """Of a model that is loaded."""

    def load(self, block: Block | None) -> None:
        """Everything is there."""

    def release(self, block: Block) -> None:
        """Everything stays."""
