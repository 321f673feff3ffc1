"""The output of a run that several ranks share: the first opens it, completes it and gives it its name; the others write to its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch import nn

from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import ExportOptions, SharedExporter, SharedStream, StreamingExporter
from quark.errors import OutputError
from quark.planning.decoder_blocks import Block, decoder_blocks
from quark.ranks import Ranks, owners
from quark.runs.run import Run
from quark.runs.sink import BlockSink, CheckpointSink, InPlaceSink
from quark.runs.skeleton import quantized_skeleton

__all__ = ["opened_sink"]


@contextmanager
def opened_sink(
    run: Run, model: nn.Module, place: Callable[[], AbstractContextManager[Path]], writer: StreamingExporter, options: ExportOptions
) -> Iterator[BlockSink]:
    """Yield the sink that a rank hands its blocks to; the output is complete when the context of the first rank ends.

    In a run with calibration data every rank comes to the same layers, and the first one writes them. Without, each block is one rank's,
    which reads, rounds and writes it; if the exporter cannot share its files (`quark.checkpoint.SharedExporter`), all are the first one's.

    Args:
        run: With its ranks.
        model: On the meta device, but for what has been read.
        place: Opens the directory that becomes the output.
        writer: The exporter.
        options: Of the export.

    Raises:
        OutputError: The first rank's directory cannot be found from this one.
    """
    ranks = run.ranks
    content = CheckpointContent(model, run.plan.config, run.plan)
    is_divided = ranks.size > 1 and not run.needs_data and isinstance(writer, SharedExporter)
    if ranks.is_first:
        with place() as directory, writer.stream(content, quantized_skeleton(model, run.plan), directory, options) as stream:
            ranks.broadcast(str(directory.absolute()))
            yield _SharedSink(model, stream, ranks, _owners(run, model)) if is_divided else CheckpointSink(model, stream)  # type: ignore[arg-type]
        return
    directory = Path(ranks.broadcast(""))
    if not directory.is_dir():
        raise OutputError(
            f"rank {ranks.rank} cannot see '{directory}', in which rank 0 builds the output: all processes need the same file system, "
            "under the same path"
        )
    if is_divided:
        assert isinstance(writer, SharedExporter)
        with writer.join(content, quantized_skeleton(model, run.plan), directory, options) as shared:
            yield _SharedSink(model, shared, ranks, _owners(run, model))
    else:
        yield InPlaceSink(model) if run.needs_data else _IdleSink(model)


def _owners(run: Run, model: nn.Module) -> dict[str, int]:
    """Return the rank that works on each block, by full name: about as many bytes for each rank."""
    blocks = decoder_blocks(model, run.plan.architecture)
    sizes = [sum(p.nbytes for p in block.module.parameters()) for block in blocks]
    outside = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    return dict(zip((block.name for block in blocks), owners(sizes, run.ranks.size, outside), strict=True))


class _SharedSink(CheckpointSink):
    """Writes the blocks of one rank.

    Args:
        model: The model that contains the layers.
        stream: The export.
        ranks: All of which write to it.
        owner_of: The rank of each block, by full name.
    """

    def __init__(self, model: nn.Module, stream: SharedStream, ranks: Ranks, owner_of: Mapping[str, int]) -> None:
        super().__init__(model, stream)
        self._shared = stream
        self._ranks = ranks
        self._owner_of = owner_of
        for name, owner in owner_of.items():
            if owner != ranks.rank:
                stream.skip(Block(name, model.get_submodule(name)))

    def wants(self, block: Block) -> bool:
        """Return whether the block is this rank's."""
        return self._owner_of[block.name] == self._ranks.rank

    def end_block(self, block: Block | None) -> None:
        """Write the block, or, on the first rank, what lies outside all blocks."""
        if block is not None or self._ranks.is_first:
            super().end_block(block)

    def finish(self, content: CheckpointContent) -> None:
        """Complete the export on the first rank, when all have written their blocks."""
        written = self._ranks.gather(self._shared.written())
        if self._ranks.is_first:
            for names in written:
                self._shared.count_as_written(names)
            super().finish(content)


class _IdleSink(InPlaceSink):
    """The sink of a rank that leaves all blocks to another one."""

    def wants(self, block: Block) -> bool:
        """Return False."""
        return False
