"""Healthy layouts that wrap the built-in one; the layouts of `layout_mutants` change one thing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quark.base.lazy import ObjectRef
from quark.checkpoint import BlockStream, CheckpointContent, Exporter, ExportOptions, FloatTensor, StoredConfig
from quark.plugins import ExporterRecord
from quark_exporters.quark_layout.dequantizer import QuarkDequantizer
from quark_exporters.quark_layout.layout import QuarkReader, SafetensorsExporter

__all__ = ["METHOD", "Announcing", "Dequantizer", "Plain", "Reader", "Resuming", "Sharing", "Streaming", "changed_json", "record_of"]

METHOD = "mutant-method"


def changed_json(path: Path, change: Any) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class Plain(Exporter):
    """The built-in layout under another ``quant_method``: a healthy layout that mutants change."""

    method = METHOD

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        SafetensorsExporter().export(content, out, options)
        self.named(out)

    def named(self, out: Path) -> None:
        changed_json(out / "config.json", lambda data: data["quantization_config"].update(quant_method=self.method))


class Streaming(Plain):
    streams = True

    @contextmanager
    def stream(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[BlockStream]:
        is_first = not any(out.iterdir())
        with SafetensorsExporter().stream(content, skeleton, out, options) as stream:
            yield stream if is_first else self.opened_again(stream)
        if (out / "config.json").is_file():  # of several processes, the first finishes
            self.named(out)

    def opened_again(self, stream: Any) -> Any:
        """Return a stream to files that another process has made."""
        return stream


class Announcing(Streaming):
    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> list[Mapping[str, Tensor]]:
        return [dict(part) for part in SafetensorsExporter().announced(content, skeleton, options)]


class Resuming(Announcing):
    resumes = True


class Sharing(Resuming):
    shares = True


class Reader(QuarkReader):
    renamings = ((r"\.weight_(scale|zero_point)$", r".weight_quantizer.\1"),)

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        return super().configuration({**block, "quant_method": "quark"}, directory)


class Dequantizer(QuarkDequantizer):
    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        yield from super().float_tensors({**block, "quant_method": "quark"}, stored)


def record_of(exporter: Any = Streaming, **fields: Any) -> ExporterRecord:
    named = {"streaming": exporter.streams, "resumable": exporter.resumes}
    streaming = {"capabilities": {capability for capability, is_able in named.items() if is_able}}
    read = {"reader": ObjectRef(Reader), "dequantizer": ObjectRef(Dequantizer), "quant_methods": (METHOD,)}
    return ExporterRecord(name="mutant_layout", exporter=ObjectRef(exporter), **{**streaming, **read, **fields})
