"""What writes a checkpoint layout. Third parties implement `Exporter` and name the class as ``exporter`` of an `ExporterRecord`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import attrs
from torch import nn

from quark.checkpoint.content import CheckpointContent
from quark.planning.decoder_blocks import Block

__all__ = ["BlockStream", "ExportOptions", "Exporter", "StreamingExporter", "Tokenizer"]


class Tokenizer(Protocol):
    """A tokenizer, as far as an exporter uses it."""

    def save_pretrained(self, save_directory: str | Path, /) -> object:
        """Write its files to a directory."""


@attrs.frozen(kw_only=True)
class ExportOptions:
    """What a caller may choose.

    Attributes:
        weight_format: ``"real_quantized"`` stores codes; ``"fake_quantized"`` the rounded values, and the same scales.
        pack_method: Order of 4-bit codes in a word: ``"reorder"`` or ``"order"``.
        kv_cache_group: Patterns of projections whose output scales are merged, beside what the model's own configuration has merged.
        min_kv_scale: Floor of the cache's scales; the larger of this and the configuration's counts.
        zero_points: Whether zero points of symmetric schemes, all 0, are written; strict readers want them.
        max_shard_bytes: Largest size of one file.
        own: Options of the exporter's own, by name: keyword arguments of its class.
        overwrite: Whether an earlier export in the same place is replaced, once the new one is complete.
        tokenizer: Written beside the weights; anything with ``save_pretrained(directory)``. None copies the files beside the source model.
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


class Exporter(Protocol):
    """Writes a quantized model.

    Implementations are classes that can be called without arguments; keyword arguments with defaults are options of the exporter's own.
    The directory that they are given is a temporary one: it is moved to where the caller wants it when the export has ended well, and
    removed when it has not, so that a failed one leaves nothing behind.
    """

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """Write a quantized model to the directory ``out``, which exists and is empty. One that writes nothing has failed.

        Args:
            content: The model, its configuration and its plan. Nothing else is known of the model: its attributes are for users.
            out: Where to.
            options: What the caller chose.

        Raises:
            UnsupportedError: The exporter cannot hold this model or these options.
            OutputError: The place cannot be written.
        """


class BlockStream(Protocol):
    """An export that is written while the model is being quantized."""

    def write(self, block: Block | None) -> None:
        """Write the tensors of a finished block, or with None those outside all blocks; they may be gone when this has returned."""

    def finish(self, content: CheckpointContent) -> None:
        """Every block has been written, and None: write what is left.

        Args:
            content: As the run has ended: the plan and the configuration no longer name algorithms that turned out to change nothing.
        """


@runtime_checkable
class StreamingExporter(Exporter, Protocol):
    """An exporter that need not have the whole model in memory. One that lacks this method gets complete models."""

    def stream(
        self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions
    ) -> AbstractContextManager[BlockStream]:
        """Begin an export to the directory ``out``, which exists and is empty.

        What it writes does not differ from what `Exporter.export` writes of the same model; it is complete when the context ends well.

        Args:
            content: Its model is still float, its weights on the meta device but for those of the block that is worked on.
            skeleton: The same model as it will be when it is quantized, on the meta device: layers and scales of the right shapes.
            out: Where to.
            options: As for `Exporter.export`.

        Raises:
            As `Exporter.export`, before anything is written where that can be known.
        """
