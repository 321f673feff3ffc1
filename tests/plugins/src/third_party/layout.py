"""Checkpoint layouts: `third_party.box`, which transformers reads too, and `third_party.single_file`."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import ExporterRecord, hookimpl


@hookimpl
def quark_register_exporters() -> Iterator[ExporterRecord]:
    """Two layouts of one ``quant_method``, told apart by a mark."""
    yield ExporterRecord(
        name="box",
        summary="safetensors files whose tensors have names of their own",
        exporter="third_party.box:BoxExporter",
        reader="third_party.box:BoxReader",
        quant_methods=("third-party-box",),
        capabilities={"resumable", "streaming"},
    )
    yield ExporterRecord(
        name="single_file",
        summary="one file of torch beside config.json",
        exporter="third_party.single_file:SingleFileExporter",
        reader="third_party.single_file:SingleFileReader",
        quant_methods=("third-party-box",),
        marks={"container": "box"},
        files=("tensors.box",),
    )
