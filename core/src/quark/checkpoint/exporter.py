"""Interface of exporters, which write a checkpoint layout.

Third parties implement `Exporter` and name the class as ``exporter`` of an `ExporterRecord`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import attrs
from torch import Tensor, nn

from quark.checkpoint.content import CheckpointContent
from quark.planning.decoder_blocks import Block

__all__ = [
    "AnnouncesTensors",
    "BlockStream",
    "ChecksModels",
    "EarlyStream",
    "EncodingStream",
    "ExportOptions",
    "Exporter",
    "ResumableExporter",
    "ResumableStream",
    "SharedExporter",
    "SharedStream",
    "StreamingExporter",
    "Tokenizer",
]


class Tokenizer(Protocol):
    """The part of a tokenizer's interface that exporters use."""

    def save_pretrained(self, save_directory: str | Path, /) -> object:
        """Write the tokenizer's files to a directory."""


@attrs.frozen(kw_only=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        weight_format: ``"real_quantized"`` stores codes; ``"fake_quantized"`` the rounded values, and the same scales.
        pack_method: Order of 4-bit codes in a word: ``"reorder"`` or ``"order"``.
        kv_cache_group: Patterns of projections whose output scales are merged, in addition to those of the model's configuration.
        min_kv_scale: Floor of the KV-cache scales; the larger of this value and the configuration's applies.
        zero_points: Whether zero points of symmetric schemes, all 0, are written; strict readers need them.
        max_shard_bytes: Largest size of one file.
        own: Options specific to the exporter, by name: keyword arguments of its class.
        overwrite: Whether an earlier export in the same place is replaced when the new one is complete.
        tokenizer: Written beside the weights; anything with ``save_pretrained(directory)``. None copies the files beside the source model.
        input_args: Example inputs for exporters that trace the model: a tensor, a tuple of arguments or a mapping of named ones. None is
            token ids, for transformers models.
    """

    weight_format: str = "real_quantized"
    pack_method: str = "reorder"
    kv_cache_group: tuple[str, ...] = ()
    min_kv_scale: float = 0.0
    zero_points: bool = True
    max_shard_bytes: int = attrs.field(default=5_000_000_000, validator=attrs.validators.gt(0))
    own: Mapping[str, Any] = attrs.field(factory=dict)
    overwrite: bool = False
    tokenizer: Tokenizer | None = None
    input_args: Any = None


class Exporter(Protocol):
    """Writes a quantized model.

    Implementations are classes that can be called without arguments; keyword arguments with defaults are options of the exporter.
    The output directory is temporary: it is renamed to its final place if the export succeeds, and removed if it fails.
    """

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """Write a quantized model to the directory ``out``, which exists and is empty. An export that writes no file counts as failed.

        Args:
            content: The model, its configuration and its plan. Exporters use these and not the attributes that users find on the model.
            out: The output directory.
            options: The options of the export.

        Raises:
            UnsupportedError: The layout cannot express this model or these options.
            OutputError: The directory cannot be written.
        """


class BlockStream(Protocol):
    """An export that is written while the model is being quantized."""

    def write(self, block: Block | None) -> None:
        """Write the tensors of a finished block, or with None those outside all blocks; the caller may release them afterwards."""

    def finish(self, content: CheckpointContent) -> None:
        """Write the remaining files, after every block and None have been written.

        Args:
            content: The final content of the run: plan and configuration no longer name algorithms that changed nothing.
        """


@runtime_checkable
class EncodingStream(BlockStream, Protocol):
    """A stream that takes codes of weights from their quantizers, as `quark.modules.packed_layers.stored_tensors` does.

    Attributes:
        encodes: Whether it does so for all weights. Layers then may have float weights, where their quantizers say so
            (`quark.modules.QuantizerModule.is_deferred`): rounded values that nobody reads are not computed.
    """

    encodes: bool


@runtime_checkable
class EarlyStream(BlockStream, Protocol):
    """A stream that is told when the tensors outside the blocks whose layers stay float have their final values: before the first block.

    They are often the largest of a model, and can be on the disk long before the last block is finished.
    """

    def write_float(self) -> None:
        """Begin to write the tensors outside the blocks that belong to no quantized layer; called once, before any block is written."""


@runtime_checkable
class StreamingExporter(Exporter, Protocol):
    """An exporter that does not need the whole model in memory. Exporters without `stream` get complete models."""

    def stream(
        self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions
    ) -> AbstractContextManager[BlockStream]:
        """Return the context of a streamed export to the directory ``out``, which exists and is empty.

        The files are the same as those of `Exporter.export` for the same model; they are complete when the context ends without an error.

        Args:
            content: The content with the float model, whose weights are on the meta device except those of the current block.
            skeleton: The quantized skeleton of the model: its layers and scales on the meta device, with the final shapes and dtypes.
            out: The output directory.
            options: As for `Exporter.export`.

        Raises:
            UnsupportedError: As by `Exporter.export`, and before any file is written where possible.
            OutputError: The directory cannot be written.
        """


@runtime_checkable
class AnnouncesTensors(Protocol):
    """An exporter that writes with `quark.checkpoint.shard_writer.ShardWriter`, so that a plan can tell the size of its files."""

    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> Iterable[Mapping[str, Tensor]]:
        """Return what the writer of an export is told: meta tensors by full name, for each part, in the order of the files.

        Args:
            content: The content with the float model.
            skeleton: As of `StreamingExporter.stream`.
            options: As for `Exporter.export`.
        """


@runtime_checkable
class ChecksModels(Protocol):
    """An exporter that says before any work whether its layout can hold a model; `quark plan` shows what it says."""

    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
        """Check a model, without a look at weights.

        Args:
            content: The content with the float model, or with the quantized one.
            skeleton: As of `StreamingExporter.stream`; or the quantized model.
            options: As for `Exporter.export`.

        Raises:
            UnsupportedError: The layout cannot express this model or these options.
        """


@runtime_checkable
class ResumableStream(BlockStream, Protocol):
    """A stream of a `ResumableExporter`: its finished blocks outlast the process, and can be read again.

    Checksums are by name of whatever the exporter stores, such as tensors, and mean something to the exporter alone; a run keeps them.
    """

    def when_stored(self, then: Callable[[Mapping[str, str]], None]) -> None:
        """Call ``then`` when everything that has been written is on the disk, with its checksums: at once, or later from another thread.

        What an earlier call has got is left out. An error of ``then`` is raised here, or by the next method that is called.
        """

    def adopt(self, block: Block, checksums: Mapping[str, str]) -> Sequence[str]:
        """Count a block as written, and return the names of what no longer has its checksum: where there are any, the block is not written.

        Args:
            block: A block that an earlier process has written to the same directory.
            checksums: What `when_stored` gave for it.
        """

    def read(self, block: Block) -> None:
        """Set the values of a block to those that were written: the inverse of `write`.

        Args:
            block: One that `adopt` has counted as written, in this process or another that has the same files open. Its quantized layers,
                and the quantizers of its attention, are in the model as for `write`, but without scales, and with float weights.
                Everything that was written is replaced by new tensors.
        """


@runtime_checkable
class ResumableExporter(StreamingExporter, Protocol):
    """An exporter whose streams go on after their process was killed. `stream` returns a `ResumableStream` too."""

    def reopen(
        self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions
    ) -> AbstractContextManager[ResumableStream]:
        """Return the context of a streamed export that was begun by `stream` in another process, with the same arguments.

        Args:
            content: As for `stream`.
            skeleton: As for `stream`.
            out: The directory with what that process had written when it ended; files may be damaged, or of a length that they had before.
            options: As for `stream`.

        Raises:
            UnsupportedError: With these options, blocks cannot be read again.
            OutputError: As by `stream`.
        """


@runtime_checkable
class SharedStream(BlockStream, Protocol):
    """An export to which several processes write, each some of the blocks. One of them has opened it, and finishes it."""

    def skip(self, block: Block) -> None:
        """Leave a block to another process."""

    def written(self) -> frozenset[str]:
        """Return the names of what this process has written, all of which is in the files."""

    def count_as_written(self, names: Iterable[str]) -> None:
        """Note what other processes have written, before `finish`."""


@runtime_checkable
class SharedExporter(StreamingExporter, Protocol):
    """An exporter to whose streams several processes can write. Those of `stream` are `SharedStream` too."""

    def join(
        self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions
    ) -> AbstractContextManager[SharedStream]:
        """Return the context of an export that another process has opened by `stream`, with the same arguments."""
