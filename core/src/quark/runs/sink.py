"""Sinks: classes that accept finished blocks. All sinks replace layers in the model. Some also write an
export.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from quark.base.log import get_logger
from quark.base.names import folded
from quark.base.ranks import Ranks, owners
from quark.checkpoint import BlockStream, CheckpointContent
from quark.models.hf.tied_tensors import other_names
from quark.models.layers import QuantizedLayer
from quark.models.plan.decoder_blocks import Block
from quark.runs.journal import FinishedBlock, Journal


@attrs.frozen
class BlockResult:
    """The results of a block that a run stores beside the block's tensors, as JSON values.

    Attributes:
        report: The block's part of the calibration report
            (`quark.calibration.report.CalibrationReport.to_dict`).
        learned: The state of the run after this block. Later blocks need this state.
    """

    report: Mapping[str, Any] = attrs.field(factory=dict)
    learned: Mapping[str, Any] = attrs.field(factory=dict)


class BlockSink(ABC):
    """Base class of sinks. A sink accepts the finished layers of one block after another.

    Attributes:
        needs_values: Whether weights must be rounded before they are accepted. If not, some weights may still
            be float when they are accepted. They can be rounded later with their scales
            (`quark.models.layers.QuantizerModule.is_deferred`).
    """

    needs_values = True

    @abstractmethod
    def accept(self, layers: Mapping[str, QuantizedLayer]) -> None:
        """Accept quantized layers. The keys of ``layers`` are their full names."""

    def finished(self, block: Block) -> BlockResult | None:
        """Return the result of a block that an interrupted run has finished. Return None for any other block.

        If the first rank returns a result, every rank reads the block. If it returns None, no rank reads the
        block.
        """
        return None

    def wants(self, block: Block) -> bool:
        """Return whether this rank quantizes ``block``.

        The method is called only if no calibration forward pass is needed.
        """
        return True

    def read(self, block: Block) -> None:
        """Read the values of a block for which `finished` returns a result.

        The sink must have accepted the layers of the block before, with float weights.
        """
        return

    def end_block(self, block: Block | None, result: BlockResult) -> None:
        """End a block. All layers of the block have been accepted, and its other tensors are final.

        If ``block`` is None, the tensors outside the blocks are final.
        """
        return

    def finish(self, content: CheckpointContent) -> None:
        """End the run. ``content`` has the quantized model and its final plan."""
        return


class InPlaceSink(BlockSink):
    """Replaces float layers by quantized layers in the model. The model is complete after its last block."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._other_names = other_names(model)

    def accept(self, layers: Mapping[str, QuantizedLayer]) -> None:
        """Replace each float layer by the quantized layer with the same name, wherever the model uses it."""
        for name, layer in layers.items():
            for place in (name, *self._other_names.get(name, ())):
                self._model.set_submodule(place, layer)


class ReadingSink(InPlaceSink):
    """Reads finished blocks from the files of an export that another process writes.

    Args:
        model: The model that contains the layers.
        stream: The opened export.
    """

    def __init__(self, model: nn.Module, stream: BlockStream) -> None:
        super().__init__(model)
        self._stream = stream

    def read(self, block: Block) -> None:
        """Read the block from the export."""
        self._stream.read(block)


class CheckpointSink(ReadingSink):
    """Writes each block to an export when the block is finished.

    Before that, the layers of the block are put into the model, because exporters find them in the model.

    Args:
        model: The model that contains the layers.
        stream: The opened export.
    """

    def __init__(self, model: nn.Module, stream: BlockStream) -> None:
        super().__init__(model, stream)
        self.needs_values = not stream.encodes

    def begin(self) -> None:
        """Write the tensors that are already final before the first block.

        Do nothing if the export does not accept tensors before the first block.

        Call this method on one rank only.
        """
        self._stream.write_float()

    def end_block(self, block: Block | None, result: BlockResult) -> None:
        """Write the block to the export."""
        self._stream.write(block)

    def finish(self, content: CheckpointContent) -> None:
        """Complete the export."""
        self._stream.finish(content)


class JournaledSink(CheckpointSink):
    """Writes each block to an export. When the block's tensors are on the disk, it adds an entry to a
    journal.

    A resumed run continues after the blocks that the journal lists. If the checksums of a block do not match,
    this block and all later blocks are quantized again, because later blocks depend on its values.

    Args:
        model: The model that contains the layers.
        stream: The opened export of an exporter that can resume.
        journal: The journal of the run.
        blocks: All blocks of the run, in order.
    """

    def __init__(self, model: nn.Module, stream: BlockStream, journal: Journal, blocks: list[Block]) -> None:
        super().__init__(model, stream)
        self._journal = journal
        self._finished: dict[str, BlockResult] = {}
        for number, (entry, block) in enumerate(zip(journal.finished, blocks, strict=False)):
            damaged = stream.adopt(block, entry.checksums) if entry.name == block.name else [block.name]
            if damaged:
                behind = len(journal.finished) - number - 1
                get_logger(__name__).warning(
                    f"The files of '{block.name}' from the interrupted run are damaged ({len(damaged)} of {len(entry.checksums)} tensors: "
                    f"{folded(damaged)}). This block and the {behind} finished block(s) after it are quantized again."
                )
                journal.cut(number)
                break
            self._finished[block.name] = BlockResult(entry.report, entry.learned)

    def finished(self, block: Block) -> BlockResult | None:
        """Return the result that the journal has for a block, or None if the journal does not have the
        block.
        """
        return self._finished.get(block.name)

    def end_block(self, block: Block | None, result: BlockResult) -> None:
        """Write the block to the export. When the block is on the disk, add an entry to the journal."""
        self._stream.write(block)
        if block is not None:
            name = block.name
            self._stream.when_stored(lambda checksums: self._journal.add(FinishedBlock(name, checksums, result.report, result.learned)))


class SharedSink(CheckpointSink):
    """Writes the blocks that one rank quantizes. The blocks of each rank have about the same total size.

    Args:
        model: The model that contains the layers.
        stream: The opened export.
        ranks: The ranks of the run. All of them write to the export.
        blocks: All blocks of the run.
    """

    def __init__(self, model: nn.Module, stream: BlockStream, ranks: Ranks, blocks: list[Block]) -> None:
        super().__init__(model, stream)
        self._ranks = ranks
        self._owner_of = _owners(model, blocks, ranks)

    def wants(self, block: Block) -> bool:
        """Return whether the block is assigned to this rank."""
        return self._owner_of[block.name] == self._ranks.rank

    def end_block(self, block: Block | None, result: BlockResult) -> None:
        """Write the block to the export. Only the first rank writes the tensors outside the blocks."""
        if block is not None or self._ranks.is_first:
            super().end_block(block, result)

    def finish(self, content: CheckpointContent) -> None:
        """Complete the export on the first rank, after all ranks have written their blocks."""
        written = self._ranks.gather(self._stream.written())
        if self._ranks.is_first:
            for names in written:
                self._stream.count_as_written(names)
            super().finish(content)


class IdleSink(InPlaceSink):
    """The sink of a rank that quantizes no blocks."""

    def wants(self, block: Block) -> bool:
        """Return False, because this rank quantizes no block."""
        return False


def _owners(model: nn.Module, blocks: list[Block], ranks: Ranks) -> Mapping[str, int]:
    """Return a dictionary from the full name of each block to the rank that quantizes it."""
    sizes = [sum(p.nbytes for p in block.module.parameters()) for block in blocks]
    outside = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    return dict(zip((block.name for block in blocks), owners(sizes, ranks.size, outside), strict=True))
