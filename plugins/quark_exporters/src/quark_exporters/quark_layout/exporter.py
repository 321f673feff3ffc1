"""SafetensorsExporter: a directory in Hugging Face form."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quark.checkpoint.companions import save_companions
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import ExportOptions, ResumableStream, SharedStream
from quark.checkpoint.shard_layout import ShardLayout
from quark.checkpoint.shard_writer import ShardWriter, create_shards
from quark.config.model import QConfig
from quark.errors import UnsupportedError
from quark.log import get_logger
from quark.planning.decoder_blocks import Block
from quark_exporters.quark_layout.layout import holds_values, is_tied_apart, quantized_parts
from quark_exporters.quark_layout.quantization_config import quantization_config
from quark_exporters.quark_layout.written_block import read_block
from quark_exporters.region import WHOLE, Region

__all__ = ["SafetensorsExporter"]


class SafetensorsExporter:
    """Writes the Quark layout; `quark_exporters.quark_layout.reader` reads it. Source: checkpoints of AMD Quark 0.13."""

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """As `quark.checkpoint.Exporter.export`."""
        with _stream(content, self.announced(content, content.model, options), out, options, checksums=False) as stream:
            stream.write(Block("", content.model))
            stream.finish(content)

    @contextmanager
    def stream(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[ResumableStream]:
        """As `quark.checkpoint.StreamingExporter.stream`."""
        with _stream(content, self.announced(content, skeleton, options), out, options, checksums=True) as stream:
            yield stream

    @contextmanager
    def reopen(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[ResumableStream]:
        """As `quark.checkpoint.ResumableExporter.reopen`."""
        if options.kv_cache_group:
            raise UnsupportedError(
                "an export with the option kv_cache_group cannot be resumed: its scales of the cache are merged when they are written, and "
                "calibration goes on with those before. Give kv_cache_group in the configuration instead, which merges them in calibration"
            )
        with self.stream(content, skeleton, out, options) as stream:
            yield stream

    @contextmanager
    def join(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[SharedStream]:
        """As `quark.checkpoint.SharedExporter.join`."""
        with ShardWriter(ShardLayout.of(self.announced(content, skeleton, options), options.max_shard_bytes), out) as writer:
            yield _Stream(content, options, out, writer)

    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> list[Mapping[str, Tensor]]:
        """As `quark.checkpoint.AnnouncesTensors.announced`."""
        return [part.meta for part in quantized_parts(skeleton, content.plan, options, WHOLE)]


@contextmanager
def _stream(
    content: CheckpointContent, announced: Iterable[Mapping[str, Tensor]], out: Path, options: ExportOptions, *, checksums: bool
) -> Iterator[_Stream]:
    _warn_of_readers(content.config, options)
    layout = ShardLayout.of(announced, options.max_shard_bytes)
    create_shards(layout, out)
    with ShardWriter(layout, out, checksums=checksums) as writer:
        yield _Stream(content, options, out, writer)


class _Stream:
    """An export that has begun."""

    def __init__(self, content: CheckpointContent, options: ExportOptions, directory: Path, writer: ShardWriter) -> None:
        self._content = content
        self._options = options
        self._directory = directory
        self._writer = writer
        self._written: list[str] = []
        self.encodes = not holds_values(options)

    def write(self, block: Block | None) -> None:
        """As `quark.checkpoint.BlockStream.write`."""
        if block is None and "" in self._written:
            return  # the model is one block, and nothing lies outside
        region = Region(without=tuple(self._written)) if block is None else Region(block.name)
        if block is not None:
            self._written.append(block.name)
        for part in quantized_parts(self._content.model, self._content.plan, self._options, region):
            # A tied parameter was announced once, under the first of its names.
            if all(name in self._writer for name in part.meta):
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

    def read(self, block: Block) -> None:
        """As `quark.checkpoint.ResumableStream.read`."""
        read_block(self._content.model, self._content.plan, self._options, Region(block.name), self._writer)

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
        config = _config_of(content, self._options)
        if isinstance(config, dict):
            (self._directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        else:
            config.to_json_file(self._directory / "config.json")
        save_companions(content.model, self._directory, self._options.tokenizer)


def _warn_of_readers(config: QConfig, options: ExportOptions) -> None:
    """Warn of runtimes that ignore algorithms that run with the model, or take rounded values for codes."""
    names = [a.name for a in config.algo_config or () if a.runs_with_model()]
    if names:
        get_logger(__name__).warning(
            f"The algorithm {', '.join(names)} runs with this model: this project and transformers with it load the export; vLLM does not "
            "know such algorithms and would compute something else without a word."
        )
    if options.weight_format != "real_quantized":
        get_logger(__name__).warning(
            f"weight_format='{options.weight_format}' stores rounded values where codes are expected: this project and transformers with "
            "it load the export; vLLM passes that setting over and would take the values for codes. For vLLM, take 'real_quantized'."
        )


def _config_of(content: CheckpointContent, options: ExportOptions) -> Any:
    """Return the content of config.json: the model's config, or, where it has none, its class; and the quantization."""
    model: Any = content.model
    if not _has_config(model):
        return {"architectures": [type(model).__name__], "quantization_config": quantization_config(content, options)}
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if is_tied_apart(model):
        config.tie_word_embeddings = False
    config.quantization_config = quantization_config(content, options)
    return config


def _has_config(model: nn.Module) -> bool:
    return hasattr(getattr(model, "config", None), "to_json_file")
