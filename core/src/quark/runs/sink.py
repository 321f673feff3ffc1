"""Sinks take finished blocks. One puts quantized layers where the float ones were, another writes them to an export besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import nn

from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import BlockStream
from quark.modules import QuantizedLayer
from quark.planning.decoder_blocks import Block

__all__ = ["BlockSink", "CheckpointSink", "InPlaceSink"]


class BlockSink(Protocol):
    """Takes the finished layers of one block after another."""

    def accept(self, layers: Mapping[str, QuantizedLayer]) -> None:
        """Take quantized layers, by full name."""

    def end_block(self, block: Block | None) -> None:
        """End a block, all of whose layers have been accepted and whose other tensors are final; None for what lies outside the blocks."""

    def finish(self, content: CheckpointContent) -> None:
        """End the run; ``content`` is the quantized model with its final plan."""


class InPlaceSink:
    """Replaces layers inside the model they came from."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def accept(self, layers: Mapping[str, QuantizedLayer]) -> None:
        """Put each layer in the place of the float layer of that name."""
        for name, layer in layers.items():
            self._model.set_submodule(name, layer)

    def end_block(self, block: Block | None) -> None:
        """Nothing is left to do: the block is complete."""

    def finish(self, content: CheckpointContent) -> None:
        """Nothing is left to do: the model is complete after each block."""


class CheckpointSink(InPlaceSink):
    """Writes each block as soon as it is finished; its layers are in the model meanwhile, where exporters look for them.

    Args:
        model: The layers' own.
        stream: The export, begun.
    """

    def __init__(self, model: nn.Module, stream: BlockStream) -> None:
        super().__init__(model)
        self._stream = stream

    def end_block(self, block: Block | None) -> None:
        """Write it."""
        self._stream.write(block)

    def finish(self, content: CheckpointContent) -> None:
        """Complete the export."""
        self._stream.finish(content)
