"""Writing quantized models and reading them back: the exporter protocol, streamed safetensors, the documented functions."""

from quark.checkpoint.export import ModelExporter, export_safetensors
from quark.checkpoint.exporter import BlockStream, Exporter, ExportOptions, StreamingExporter
from quark.checkpoint.packed_model import map_to_quark
from quark.checkpoint.reader import import_model_from_safetensors

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
