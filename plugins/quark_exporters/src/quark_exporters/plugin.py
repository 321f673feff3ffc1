"""What quark-exporters registers. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import ExporterRecord, hookimpl

__all__ = ["QUARK_API", "quark_register_exporters"]

QUARK_API = (1, 1)


@hookimpl
def quark_register_exporters() -> Iterator[ExporterRecord]:
    """Yield the exporters."""
    yield ExporterRecord(
        name="safetensors",
        aliases=("quark",),
        summary="the Quark checkpoint layout, read by transformers and vLLM",
        exporter="quark_exporters.quark_layout.exporter:SafetensorsExporter",
        reader="quark_exporters.quark_layout.reader:QuarkReader",
        quant_methods=("quark",),
        capabilities={"streaming", "resumable"},
    )
    yield ExporterRecord(
        name="gguf",
        summary="a GGUF file, run by llama.cpp and read by transformers",
        exporter="quark_exporters.gguf_layout.exporter:GgufExporter",
        files=("*.gguf",),
        capabilities={"streaming", "tokenizer_inside"},
    )
