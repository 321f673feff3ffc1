"""Sinks accept finished blocks: one replaces float layers by quantized ones in the model, the other also writes each block to an export."""

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
    """Accepts the finished layers of one block after another."""

    def wants(self, block: Block) -> bool:
        """Return whether this rank has to quantize a block for which no calibration forward is needed: else another rank does."""

    def accept(self, layers: Mapping[str, QuantizedLayer]) -> None:
        """Accept quantized layers, by full name."""

    def end_block(self, block: Block | None) -> None:
        """End a block: all its layers have been accepted, and its other tensors are final. None ends the part outside the blocks."""

    def finish(self, content: CheckpointContent) -> None:
        """End the run; ``content`` is the quantized model with its final plan."""


class InPlaceSink:
    """Replaces float layers by quantized layers inside the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def wants(self, block: Block) -> bool:
        """Return True: the model is complete on every rank."""
        return True

    def accept(self, layers: Mapping[str, QuantizedLayer]) -> None:
        """Replace the float layer of each name by the quantized layer."""
        for name, layer in layers.items():
            self._model.set_submodule(name, layer)

    def end_block(self, block: Block | None) -> None:
        """Do nothing: the block is complete."""

    def finish(self, content: CheckpointContent) -> None:
        """Do nothing: the model is complete after its last block."""


class CheckpointSink(InPlaceSink):
    """Writes each block to an export when it is finished; its layers are in the model at that time, where exporters look for them.

    Args:
        model: The model that contains the layers.
        stream: The export, which has been opened.
    """

    def __init__(self, model: nn.Module, stream: BlockStream) -> None:
        super().__init__(model)
        self._stream = stream

    def end_block(self, block: Block | None) -> None:
        """Write the block to the export."""
        self._stream.write(block)

    def finish(self, content: CheckpointContent) -> None:
        """Complete the export."""
        self._stream.finish(content)
