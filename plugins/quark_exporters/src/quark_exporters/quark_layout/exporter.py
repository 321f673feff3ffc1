"""SafetensorsExporter: the Quark layout, in a directory in Hugging Face form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from quark.checkpoint.checkpoint_exporter import DirectoryExporter, DirectoryStream
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import ExportOptions, ResumableStream
from quark.checkpoint.region import WHOLE, Region
from quark.checkpoint.shard_writer import Part
from quark.errors import UnsupportedError
from quark.log import get_logger
from quark.planning.decoder_blocks import Block
from quark.planning.plan import QuantPlan
from quark_exporters.quark_layout.layout import quantized_parts
from quark_exporters.quark_layout.quantization_config import quantization_config
from quark_exporters.quark_layout.written_block import read_block

__all__ = ["SafetensorsExporter"]


class _Stream(DirectoryStream):
    """An export that has begun, as `quark.checkpoint.ResumableStream`."""

    def read(self, block: Block) -> None:
        """As `quark.checkpoint.ResumableStream.read`."""
        read_block(self._content.model, self._content.plan, self._options, Region(block.name), self._writer)


class SafetensorsExporter(DirectoryExporter):
    """Writes the Quark layout; `quark_exporters.quark_layout.reader` reads it. Source: checkpoints of AMD Quark 0.13."""

    stream_type = _Stream

    def parts(self, model: nn.Module, plan: QuantPlan, options: ExportOptions, region: Region = WHOLE) -> list[Part]:
        """As `DirectoryExporter.parts`."""
        return quantized_parts(model, plan, options, region)

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        """As `DirectoryExporter.quantization_config`."""
        return quantization_config(content, options)

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

    def warn(self, content: CheckpointContent, options: ExportOptions) -> None:
        """Warn of runtimes that ignore algorithms that run with the model, or take rounded values for codes."""
        names = [a.name for a in content.config.algo_config or () if a.runs_with_model()]
        if names:
            get_logger(__name__).warning(
                f"The algorithm {', '.join(names)} runs with this model: this project and transformers with it load the export; vLLM does "
                "not know such algorithms and would compute something else without a word."
            )
        if options.weight_format != "real_quantized":
            get_logger(__name__).warning(
                f"weight_format='{options.weight_format}' stores rounded values where codes are expected: this project and transformers "
                "with it load the export; vLLM passes that setting over and would take the values for codes. For vLLM, take "
                "'real_quantized'."
            )
