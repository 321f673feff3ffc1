"""The output that ranks share: which rank opens it, and which rank writes a block to its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from quark.base.ranks import Ranks, owners
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import BlockStream, Exporter, ExportOptions
from quark.errors import OutputError
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.runs.run import Run, StartedRun
from quark.runs.sink import BlockResult, BlockSink, CheckpointSink, InPlaceSink
from quark.runs.skeleton import quantized_skeleton

__all__ = ["directory_of_first", "is_divided", "opened_sink", "sink_of_other"]


def is_divided(run: Run, ranks: Ranks) -> bool:
    """Return whether each block is one rank's.

    That is so where there are several, and no calibration forward has to pass all blocks.
    """
    return ranks.size > 1 and not run.needs_data


def directory_of_first(ranks: Ranks) -> Path:
    """Return the directory that the first rank has opened, which it tells this one.

    Raises:
        OutputError: It cannot be found from this rank.
    """
    directory = Path(ranks.broadcast(""))
    if not directory.is_dir():
        raise OutputError(
            f"rank {ranks.rank} cannot see '{directory}', in which rank 0 builds the output: all processes need the same file system, "
            "under the same path"
        )
    return directory


@contextmanager
def opened_sink(started: StartedRun, is_divided: bool, directory: Path, writer: Exporter, options: ExportOptions) -> Iterator[BlockSink]:
    """Yield the sink that a rank hands its blocks to; nothing is entered in a journal.

    In a run with calibration data every rank comes to the same layers, and the first one writes them.
    Without, each block is one rank's, which reads, rounds and writes it; if the exporter cannot share its
    files (`quark.checkpoint.Exporter.shares`), all are the first one's.

    Args:
        started: Has the ranks.
        is_divided: Whether each block is one rank's.
        directory: That becomes the output.
        writer: The exporter.
        options: Of the export.
    """
    ranks, model = started.run.ranks, started.model
    content = CheckpointContent(model, started.plan.config, started.plan)
    if ranks.is_first:
        with writer.stream(content, quantized_skeleton(model, started.plan), directory, options) as stream:
            ranks.barrier()  # the files are there now
            is_shared = is_divided and writer.shares
            sink = _SharedSink(started, stream) if is_shared else CheckpointSink(model, stream)
            sink.begin()
            yield sink
        return
    ranks.barrier()
    if not is_divided:
        yield InPlaceSink(model)
    elif writer.shares:
        with writer.join(content, quantized_skeleton(model, started.plan), directory, options) as shared:
            yield _SharedSink(started, shared)
    else:
        yield _IdleSink(model)


@contextmanager
def sink_of_other(started: StartedRun, directory: Path, writer: Exporter | None, options: ExportOptions) -> Iterator[BlockSink]:
    """Yield the sink of another rank than the first, which alone writes the output, with a journal.

    Args:
        started: Has the ranks.
        directory: That becomes the output.
        writer: The exporter, where an interrupted run has finished blocks; else None.
        options: Of the export.
    """
    model = started.model
    started.run.ranks.barrier()
    if writer is None:
        yield InPlaceSink(model)
        return
    content = CheckpointContent(model, started.plan.config, started.plan)
    with writer.reopen(content, quantized_skeleton(model, started.plan), directory, options) as stream:
        yield _ReadingSink(model, stream)


class _ReadingSink(InPlaceSink):
    """Reads finished blocks from the files of the first rank.

    Args:
        model: The model that contains the layers.
        stream: The export, from which this rank only reads.
    """

    def __init__(self, model: nn.Module, stream: BlockStream) -> None:
        super().__init__(model)
        self._stream = stream

    def read(self, block: Block) -> None:
        """Read the block from the export."""
        self._stream.read(block)


class _SharedSink(CheckpointSink):
    """Writes the blocks of one rank; blocks are shared so that each rank has about as many bytes.

    Args:
        started: Has the ranks, all of which write to the stream.
        stream: The export.
    """

    def __init__(self, started: StartedRun, stream: BlockStream) -> None:
        super().__init__(started.model, stream)
        self._ranks = started.run.ranks
        blocks = decoder_blocks(started.model, started.plan.architecture)
        self._owner_of = _owners(started.model, blocks, self._ranks)
        for block in blocks:
            if not self.wants(block):
                stream.skip(block)

    def wants(self, block: Block) -> bool:
        """Return whether the block is this rank's."""
        return self._owner_of[block.name] == self._ranks.rank

    def end_block(self, block: Block | None, result: BlockResult) -> None:
        """Write the block, or, on the first rank, the tensors outside all blocks."""
        if block is not None or self._ranks.is_first:
            super().end_block(block, result)

    def finish(self, content: CheckpointContent) -> None:
        """Complete the export on the first rank, when all have written their blocks."""
        written = self._ranks.gather(self._stream.written())
        if self._ranks.is_first:
            for names in written:
                self._stream.count_as_written(names)
            super().finish(content)


def _owners(model: nn.Module, blocks: list[Block], ranks: Ranks) -> Mapping[str, int]:
    """Return the rank that works on each block, by full name."""
    sizes = [sum(p.nbytes for p in block.module.parameters()) for block in blocks]
    outside = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    return dict(zip((block.name for block in blocks), owners(sizes, ranks.size, outside), strict=True))


class _IdleSink(InPlaceSink):
    """The sink of a rank that leaves all blocks to another one."""

    def wants(self, block: Block) -> bool:
        """Return False."""
        return False
