"""`Exporter`, which writes a quantized model, and `BlockStream`, which writes a model block by block.

A plugin derives a class from `Exporter`. For safetensors files, derive from
`quark.checkpoint.CheckpointExporter` instead, which supports streamed, resumed and shared exports. The plugin
names the class as ``exporter`` of an `ExporterRecord`.
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
    """The protocol of tokenizers. It has only the method that exporters call."""

    def save_pretrained(self, save_directory: str | Path, /) -> object:
        """Write the tokenizer's files to a directory."""


@attrs.frozen(kw_only=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        weight_format: ``"real_quantized"`` stores codes and scales. ``"fake_quantized"`` stores rounded
            values and scales.
        pack_method: Packing order of 4-bit codes in a word, ``"reorder"`` or ``"order"``.
        kv_cache_group: Patterns that match names of projections. The output scales of these projections are
            merged. If the configuration of the model has such patterns, both apply.
        min_kv_scale: Lower limit of the scales of the KV cache. If the limit in the configuration is larger,
            the larger limit applies.
        zero_points: Whether to write the zero points of symmetric schemes. They are all 0, but strict readers
            need them.
        max_shard_bytes: Largest size of one file, in bytes.
        own: Options of the exporter itself, as a dictionary of keyword arguments for the exporter's class.
        overwrite: Whether an earlier export in the same place is replaced when the new export is complete.
        tokenizer: A tokenizer to write beside the weights. It can be any object with a method
            ``save_pretrained(directory)``. If None, the files of the source model's tokenizer are copied.
        input_args: Example inputs for exporters that trace the model. This is a tensor, a tuple of arguments,
            or a mapping of named arguments. None means token ids, which work for transformers models.

    Raises:
        ConfigError: (a ValueError) ``weight_format`` or ``pack_method`` is not valid.
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

    A run calls `when_stored`, `adopt`, `read`, `written` and `count_as_written` only if the run can be
    resumed, or if several processes share the run.

    Attributes:
        encodes: Whether the stream gets the codes of all weights from the quantizers, like
            `quark.models.layers.coded_layer.stored_tensors`. If so, rounded values need not be computed, so
            layers with deferred quantizers (`quark.models.layers.QuantizerModule.is_deferred`) still have
            float weights.
    """

    encodes: bool = False

    @abstractmethod
    def write(self, block: Block | None) -> None:
        """Write the tensors of a finished block. If ``block`` is None, write the tensors outside all blocks.

        The caller may free the memory of the tensors afterwards.
        """

    @abstractmethod
    def finish(self, content: CheckpointContent) -> None:
        """Write the remaining files. All blocks, and the tensors outside the blocks, are already written.

        Args:
            content: The final content of the run. The plan and the configuration in this content no longer
                name algorithms that changed nothing.
        """

    def write_float(self) -> None:  # noqa: B027 - a stream may write everything in order
        """Begin to write those tensors outside the blocks that belong to no quantized layer.

        A run calls this method once, before any block is written. At that time, these tensors have their
        final values. They are often the largest tensors of a model, so it saves time to write them while
        blocks are quantized. The default implementation does nothing. `write` then writes these tensors
        together with the other tensors outside the blocks.
        """

    def when_stored(self, then: Callable[[Mapping[str, str]], None]) -> None:
        """Call ``then`` with the checksums of all written tensors as soon as the tensors are on the disk.

        The call happens immediately, or later in another thread. The checksums do not include tensors for
        which this method was already called. If ``then`` raises an error, this method or the next method that
        is called raises the error.

        Args:
            then: A function whose argument is a dictionary from name to checksum. The names are usually names
                of tensors. A run only stores this dictionary, and passes it to `adopt` later.
        """
        _lacking(self, "when_stored", "resumes")

    def adopt(self, block: Block, checksums: Mapping[str, str]) -> Sequence[str]:
        """Accept a block that an earlier process has written, if the checksums of the tensors are unchanged.

        Return the names of the tensors whose checksums differ. If there are such tensors, the run writes the
        block again.

        Args:
            block: A block that an earlier process has written to the same directory.
            checksums: The checksums that `when_stored` has passed to ``then`` for this block.
        """
        _lacking(self, "adopt", "resumes")

    def read(self, block: Block) -> None:
        """Set the tensors of a block from the written tensors. This is the inverse of `write`.

        Args:
            block: A block that `adopt` has accepted, either in this process or in another process that writes
                the same files. The block already has quantized layers and quantizers of attention, but the
                weights are float, and the quantizers have no scales.
        """
        _lacking(self, "read", "resumes")

    def written(self) -> Mapping[str, str]:
        """Return a dictionary from name to checksum for the tensors that this process has written."""
        _lacking(self, "written", "shares")

    def count_as_written(self, names: Mapping[str, str]) -> None:
        """Record that another process has written tensors. A run calls this method before `finish`.

        ``names`` is the result of `written` in the other process.
        """
        _lacking(self, "count_as_written", "shares")


class Exporter(ABC):
    """The base class of exporters, which write quantized models.

    An exporter that writes only complete models needs only the method `export`. The class must be callable
    without arguments. Keyword arguments with defaults are options of the exporter. The output directory is
    temporary. It is renamed to the final path if the export succeeds, and removed if the export fails.

    Attributes:
        holds_branches: Whether the exporter writes the tensors of `quark.models.layers.Branch` modules, and
            the reader of the layout reads them. If False, quark refuses to export models with branches.
        streams: Whether the exporter can write a model block by block, with `stream`. If False, the exporter
            gets only complete models. If True, the exporter's record must have the capability ``streaming``.
        resumes: Whether `stream` can continue the export of a process that was killed. If True, the streams
            must define `when_stored`, `adopt` and `read`, and the exporter's record must have the capability
            ``resumable``.
        shares: Whether several processes can call `stream` at the same time, so that each process writes some
            of the blocks. If True, the streams must define `written` and `count_as_written`.
    """

    holds_branches: ClassVar[bool] = False
    streams: ClassVar[bool] = False
    resumes: ClassVar[bool] = False
    shares: ClassVar[bool] = False

    @abstractmethod
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """Write a quantized model to the directory ``out``, which exists and is empty.

        If this method writes no file, the export fails with an error.

        Args:
            content: The model, its configuration and its plan. An exporter must use this configuration and
                this plan. The attributes of the model with the same facts are only for users.
            out: The output directory.
            options: The options of the export.

        Raises:
            UnsupportedError: The layout cannot express this model or these options. `check` raises the same
                error.
            OutputError: The directory cannot be written.
        """

    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:  # noqa: B027 - a layout may hold all
        """Check whether the layout can represent a model. Do not read weights.

        The default implementation accepts every model. A run calls this method before it starts any work. If
        the method raises an error, `quark plan` shows the error, and a run stops. quark adds the names of the
        installed layouts that can represent the model to the message.

        Args:
            content: The content with the float model, or with the quantized model.
            skeleton: The quantized model, or its skeleton, which is described in `stream`.
            options: The options of the export.

        Raises:
            UnsupportedError: The layout cannot express this model or these options.
        """

    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> list[Mapping[str, Tensor]] | None:
        """Return a dictionary from full name to meta tensor for each part of an export.

        The parts are in the order in which they are written. `quark plan` uses the sizes of these tensors.
        The default implementation returns None. None means that the sizes are unknown, because the files are
        not written by `quark.checkpoint.shard_writer.ShardWriter`.

        Args:
            content: The content with the float model.
            skeleton: The skeleton of the quantized model, which is described in `stream`.
            options: The options of the export.
        """
        return None

    def stream(
        self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions
    ) -> AbstractContextManager[BlockStream]:
        """Return a context manager for a streamed export to the directory ``out``.

        The files must equal the files that `export` writes for the same model. They are complete when the
        ``with`` statement of the first process ends without an error.

        Args:
            content: The content with the float model. Only the weights of the current block are in memory.
                All other weights are on the meta device.
            skeleton: A copy of the model with quantized layers. Its weights and scales have the final shapes
                and dtypes, but are on the meta device.
            out: The output directory. It is empty, or another call with equal arguments has written to it. If
                ``resumes`` is True, the process of the other call may have been killed, and files may be
                damaged or too short. If ``shares`` is True, the other process may still be writing.
            options: The options of the export.

        Raises:
            UnsupportedError: The layout cannot express this model or these options. If possible, raise this
                before any file is written.
            OutputError: The directory cannot be written.
        """
        _lacking(self, "stream", "streams")


def _lacking(owner: object, method: str, promise: str) -> NoReturn:
    """Raise an error because a class lacks a method that the exporter's attribute ``promise`` requires."""
    raise NotImplementedError(f"{type(owner).__name__} has no method '{method}', which an exporter with {promise}=True needs")
