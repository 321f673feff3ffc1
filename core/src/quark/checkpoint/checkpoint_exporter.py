"""DirectoryExporter: base of exporters that write a directory in Hugging Face form: safetensors files, config.json and companions."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quark.checkpoint.companions import save_companions
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import ExportOptions, SharedStream
from quark.checkpoint.model_tensors import holds_values, is_tied_apart
from quark.checkpoint.region import WHOLE, Region
from quark.checkpoint.shard_layout import ShardLayout
from quark.checkpoint.shard_writer import Part, ShardWriter, create_shards
from quark.planning.decoder_blocks import Block, decoder_blocks
from quark.planning.plan import QuantPlan

__all__ = ["DirectoryExporter", "DirectoryStream"]


class DirectoryStream:
    """An export that has begun, as `SharedStream`, `EncodingStream` and `EarlyStream` of `quark.checkpoint`."""

    def __init__(
        self, exporter: DirectoryExporter, content: CheckpointContent, options: ExportOptions, directory: Path, writer: ShardWriter
    ) -> None:
        self._exporter = exporter
        self._content = content
        self._options = options
        self._directory = directory
        self._writer = writer
        self._written: list[str] = []
        self._early: set[str] = set()
        self.encodes = not holds_values(options)

    def write_float(self) -> None:
        """As `quark.checkpoint.EarlyStream.write_float`."""
        model, plan = self._content.model, self._content.plan
        inside = [block.name for block in decoder_blocks(model, plan.architecture)]
        if "" in inside:
            return
        outside = Region(without=(*inside, *(row.name for row in plan.quantized)))
        parts = [p for p in self._exporter.parts(model, plan, self._options, outside) if all(name in self._writer for name in p.meta)]
        self._early = {name for part in parts for name in part.meta}
        if parts:
            meta = {name: tensor for part in parts for name, tensor in part.meta.items()}
            self._writer.write_beside(Part(meta, lambda: {name: t for part in parts for name, t in part.make().items()}))

    def write(self, block: Block | None) -> None:
        """As `quark.checkpoint.BlockStream.write`."""
        if block is None and "" in self._written:
            return  # the model is one block, and nothing lies outside
        region = Region(without=tuple(self._written)) if block is None else Region(block.name)
        if block is not None:
            self._written.append(block.name)
        for part in self._exporter.parts(self._content.model, self._content.plan, self._options, region):
            # A tied parameter was announced once, under the first of its names.
            if not self._early.issuperset(part.meta) and all(name in self._writer for name in part.meta):
                self._writer.write(part, checksums=block is not None)

    def when_stored(self, then: Callable[[Mapping[str, str]], None]) -> None:
        """As `quark.checkpoint.ResumableStream.when_stored`."""
        self._writer.when_stored(then)

    def adopt(self, block: Block, checksums: Mapping[str, str]) -> Sequence[str]:
        """As `quark.checkpoint.ResumableStream.adopt`."""
        damaged = self._writer.adopt(checksums)
        if not damaged:
            self._written.append(block.name)
        return damaged

    def skip(self, block: Block) -> None:
        """As `quark.checkpoint.SharedStream.skip`."""
        self._written.append(block.name)

    def written(self) -> frozenset[str]:
        """As `quark.checkpoint.SharedStream.written`."""
        return frozenset(self._writer.written())

    def count_as_written(self, names: Iterable[str]) -> None:
        """As `quark.checkpoint.SharedStream.count_as_written`."""
        self._writer.count_as_written(names)

    def finish(self, content: CheckpointContent) -> None:
        """As `quark.checkpoint.BlockStream.finish`."""
        self._writer.finish()
        config = _config_of(content, self._exporter.quantization_config(content, self._options))
        if isinstance(config, dict):
            (self._directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        else:
            config.to_json_file(self._directory / "config.json")
        save_companions(content.model, self._directory, self._options.tokenizer)


class DirectoryExporter(ABC):
    """Writes a model part by part, in memory or block by block. A layout says which tensors there are, and what config.json says of them.

    Attributes:
        stream_type: What `stream` yields.
    """

    stream_type: type[DirectoryStream] = DirectoryStream

    @abstractmethod
    def parts(self, model: nn.Module, plan: QuantPlan, options: ExportOptions, region: Region = WHOLE) -> list[Part]:
        """Return the tensors that a region of a quantized model becomes, in the order of the files; those of a layer are one part."""

    @abstractmethod
    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        """Return the ``quantization_config`` of ``config.json``."""

    def refuse(self, content: CheckpointContent, options: ExportOptions) -> None:  # noqa: B027 - a layout may hold everything
        """Raise UnsupportedError where the layout cannot hold the plan of a model, or these options. By default it holds everything."""

    def warn(self, content: CheckpointContent, options: ExportOptions) -> None:  # noqa: B027 - nothing to warn of
        """Log what readers of the layout do otherwise than the model; called when an export begins. By default nothing."""

    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
        """As `quark.checkpoint.ChecksModels.check`."""
        self.refuse(content, options)

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """As `quark.checkpoint.Exporter.export`."""
        with self._opened(content, content.model, out, options, checksums=False) as stream:
            stream.write(Block("", content.model))
            stream.finish(content)

    @contextmanager
    def stream(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[Any]:
        """As `quark.checkpoint.StreamingExporter.stream`."""
        with self._opened(content, skeleton, out, options, checksums=True) as stream:
            yield stream

    @contextmanager
    def join(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[SharedStream]:
        """As `quark.checkpoint.SharedExporter.join`."""
        with ShardWriter(ShardLayout.of(self.announced(content, skeleton, options), options.max_shard_bytes), out) as writer:
            yield self.stream_type(self, content, options, out, writer)

    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> list[Mapping[str, Tensor]]:
        """As `quark.checkpoint.AnnouncesTensors.announced`. Raises UnsupportedError as `refuse` does."""
        self.refuse(content, options)
        return [part.meta for part in self.parts(skeleton, content.plan, options)]

    @contextmanager
    def _opened(
        self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions, *, checksums: bool
    ) -> Iterator[DirectoryStream]:
        announced = self.announced(content, skeleton, options)
        self.warn(content, options)
        layout = ShardLayout.of(announced, options.max_shard_bytes)
        create_shards(layout, out)
        with ShardWriter(layout, out, checksums=checksums) as writer:
            yield self.stream_type(self, content, options, out, writer)


def _config_of(content: CheckpointContent, quantization: dict[str, Any]) -> Any:
    """Return the content of config.json: the model's config, or, where it has none, its class; and the quantization."""
    model: Any = content.model
    if not _has_config(model):
        return {"architectures": [type(model).__name__], "quantization_config": quantization}
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if is_tied_apart(model):
        config.tie_word_embeddings = False
    config.quantization_config = quantization
    return config


def _has_config(model: nn.Module) -> bool:
    return hasattr(getattr(model, "config", None), "to_json_file")
