"""What quark-exporters registers. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import ExporterRecord, hookimpl

__all__ = ["quark_register_exporters"]


@hookimpl
def quark_register_exporters() -> Iterator[ExporterRecord]:
    """The exporters."""
    yield ExporterRecord(
        name="safetensors",
        aliases=("quark",),
        summary="the Quark checkpoint layout, read by transformers and vLLM",
        exporter="quark_exporters.quark_layout.exporter:SafetensorsExporter",
        reader="quark_exporters.quark_layout.reader:QuarkReader",
        quant_methods=("quark",),
    )
