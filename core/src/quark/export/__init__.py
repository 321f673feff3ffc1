"""Writing quantized models and reading them back: the exporter protocol, streamed safetensors, the documented functions."""

from quark.export.api import ModelExporter, export_safetensors
from quark.export.mapping import map_to_quark
from quark.export.protocol import BlockStream, Exporter, ExportOptions, StreamingExporter
from quark.export.reader import import_model_from_safetensors

__all__ = [
    "BlockStream",
    "ExportOptions",
    "Exporter",
    "ModelExporter",
    "StreamingExporter",
    "export_safetensors",
    "import_model_from_safetensors",
    "map_to_quark",
]
