"""Exporter, which writes a quantized model, and BlockStream, an export that is written block by block.

Third parties derive from `Exporter`, or, for safetensors files, from `quark.checkpoint.CheckpointExporter`,
which streams, resumes and shares. They name the class as ``exporter`` of an `ExporterRecord`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import attrs
from torch import Tensor, nn

from quark.checkpoint.content import CheckpointContent
from quark.config.fields import one_of
from quark.models.plan.decoder_blocks import Block


class Tokenizer(Protocol):
    """The part of a tokenizer's interface that exporters use."""

    def save_pretrained(self, save_directory: str | Path, /) -> object:
        """Write the tokenizer's files to a directory."""


@attrs.frozen(kw_only=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        weight_format: ``"real_quantized"`` stores codes; ``"fake_quantized"`` stores rounded values, and the
            same scales.
        pack_method: Order of 4-bit codes in a word: ``"reorder"`` or ``"order"``.
        kv_cache_group: Patterns of projections whose output scales are merged, in addition to the patterns in
            the model's configuration.
        min_kv_scale: Smallest scale of the KV cache; the larger of this value and the configuration's
            applies.
        zero_points: Whether zero points of symmetric schemes, all 0, are written; strict readers need them.
        max_shard_bytes: Largest size of one file.
        own: Options specific to the exporter, by name: keyword arguments of its class.
        overwrite: Whether to replace an earlier export in the same place when the new one is complete.
        tokenizer: Written beside the weights; anything with ``save_pretrained(directory)``. None copies the
            files beside the source model.
        input_args: Example inputs for exporters that trace the model: a tensor, a tuple of arguments or a
            mapping of named arguments. None means token ids, for transformers models.

    Raises:
        ConfigError: (a ValueError) The format or the order is not valid.
    """

    weight_format: str = attrs.field(default="real_quantized", validator=one_of("real_quantized", "fake_quantized"))
    pack_method: str = attrs.field(default="reorder", validator=one_of("reorder", "order"))
    kv_cache_group: tuple[str, ...] = ()
    min_kv_scale: float = 0.0
    zero_points: bool = True
    max_shard_bytes: int = attrs.field(default=5_000_000_000, validator=attrs.validators.gt(0))
    own: Mapping[str, Any] = attrs.field(factory=dict)
    overwrite: bool = False
    tokenizer: Tokenizer | None = None
    input_args: Any = None

    @property
    def stores_values(self) -> bool:
        """Whether rounded values are stored instead of their codes."""
        return self.weight_format == "fake_quantized"


class BlockStream(ABC):
    """An export that is written while the model is being quantized.

    Only runs that resume or share call the methods from `when_stored` on.

    Attributes:
        encodes: Whether it takes the codes of all weights from their quantizers, as
            `quark.models.layers.coded_layer.stored_tensors` does. If so, layers whose quantizers are deferred
            (`quark.models.layers.QuantizerModule.is_deferred`) have float weights, so that unused rounded
            values are not computed.
    """

    encodes: bool = False

    @abstractmethod
    def write(self, block: Block | None) -> None:
        """Write the tensors of a finished block; None writes the tensors outside all blocks.

        The caller may release them afterwards.
        """

    @abstractmethod
    def finish(self, content: CheckpointContent) -> None:
        """Write the remaining files, after all blocks and the tensors outside them have been written.

        Args:
            content: The final content of the run: plan and configuration no longer name algorithms that
                changed nothing.
        """

    def write_float(self) -> None:  # noqa: B027 - a stream may write everything in order
        """Begin to write the tensors outside the blocks that belong to no quantized layer.

        It is called once, before any block is written. These tensors have their final values then, are often
        the largest of a model, and can be on the disk long before the last block is finished. By default,
        they are written with the other tensors outside the blocks.
        """

    def when_stored(self, then: Callable[[Mapping[str, str]], None]) -> None:
        """Call ``then`` with the checksums of everything written, when it is on the disk.

        The call happens at once, or later in another thread. Checksums of earlier calls are left out. An
        error of ``then`` is raised here, or by the next method that is called.

        Args:
            then: Gets checksums by name of the stored things, such as tensors. Only the exporter interprets
                them; a run stores them.
        """
        _lacking(self, "when_stored", "resumes")

    def adopt(self, block: Block, checksums: Mapping[str, str]) -> Sequence[str]:
        """Count a block as written, and return the names of tensors that no longer have their checksums.

        If there are any, the block does not count as written.

        Args:
            block: A block that an earlier process has written to the same directory.
            checksums: The block's checksums from `when_stored`.
        """
        _lacking(self, "adopt", "resumes")

    def read(self, block: Block) -> None:
        """Set the values of a block to the written values: the inverse of `write`.

        Args:
            block: A block that `adopt` has counted as written, in this process or in another with the same
                files open. Its quantized layers, and the quantizers of its attention, are in the model as for
                `write`, but without scales, and with float weights.
        """
        _lacking(self, "read", "resumes")

    def written(self) -> Mapping[str, str]:
        """Return the checksums, by name, of the tensors that this process has written to the files."""
        _lacking(self, "written", "shares")

    def count_as_written(self, names: Mapping[str, str]) -> None:
        """Count tensors as written, before `finish`; ``names`` comes from another process's `written`."""
        _lacking(self, "count_as_written", "shares")


class Exporter(ABC):
    """Writes a quantized model. An exporter of whole models needs one method, `export`.

    Classes can be called without arguments; keyword arguments with defaults are options of the exporter. The
    output directory is temporary: it is renamed to its final place if the export succeeds, and removed if it
    fails.

    Attributes:
        holds_branches: Whether it writes the tensors of `quark.models.layers.Branch` modules and its reader
            finds them; otherwise models with branches are refused.
        streams: Whether it writes block by block, with `stream`; other exporters get complete models. Its
            record has the capability ``streaming``.
        resumes: Whether `stream` continues the export of a killed process; its streams have the methods for
            this. Its record has the capability ``resumable``.
        shares: Whether several processes can call `stream` at once and write some blocks each; its streams
            have the methods for this.
    """

    holds_branches: ClassVar[bool] = False
    streams: ClassVar[bool] = False
    resumes: ClassVar[bool] = False
    shares: ClassVar[bool] = False

    @abstractmethod
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """Write a quantized model to the directory ``out``, which exists and is empty.

        An export that writes no file counts as failed.

        Args:
            content: The model, its configuration and its plan. Exporters use these, not the attributes on the
                model, which are for users.
            out: The output directory.
            options: The options of the export.

        Raises:
            UnsupportedError: The layout cannot express this model or these options; `check` raises it too.
            OutputError: The directory cannot be written.
        """

    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:  # noqa: B027 - a layout may hold all
        """Check, before any work and without reading weights, whether the layout can hold a model.

        By default, no model is refused. `quark plan` shows the error, and a run is refused with it; the
        message also names the installed layouts that can hold the model.

        Args:
            content: The content with the float model, or with the quantized model.
            skeleton: As in `stream`; or the quantized model.
            options: As in `export`.

        Raises:
            UnsupportedError: The layout cannot express this model or these options.
        """

    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> list[Mapping[str, Tensor]] | None:
        """Return meta tensors by full name, for each part of an export in the order of its files.

        A plan uses their sizes. None, the default, means that the sizes are unknown, because
        `quark.checkpoint.shard_writer.ShardWriter` does not write the files.

        Args:
            content: The content with the float model.
            skeleton: As in `stream`.
            options: As in `export`.
        """
        return None

    def stream(
        self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions
    ) -> AbstractContextManager[BlockStream]:
        """Return the context of a streamed export to the directory ``out``.

        The files equal the files that `export` writes for the same model. They are complete when the context
        of the first process ends without an error.

        Args:
            content: The content with the float model, whose weights are on the meta device except in the
                current block.
            skeleton: The quantized skeleton of the model: its layers and scales on the meta device, with the
                final shapes and dtypes.
            out: The output directory. It is empty, or another call with equal arguments has written to it. If
                the exporter ``resumes``, the process of that call may have been killed, and its files may be
                damaged or too short. If it ``shares``, that process may still be writing.
            options: As in `export`.

        Raises:
            UnsupportedError: As `export` does; if possible, before any file is written.
            OutputError: The directory cannot be written.
        """
        _lacking(self, "stream", "streams")


def _lacking(owner: object, method: str, promise: str) -> NoReturn:
    raise NotImplementedError(f"{type(owner).__name__} has no method '{method}', which an exporter with {promise}=True needs")
