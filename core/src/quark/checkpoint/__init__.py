"""Writing quantized models and reading them back: protocols of layouts, streamed safetensors, AMD Quark's public functions."""

from quark.checkpoint.companions import save_companions
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.export import ModelExporter, export_safetensors
from quark.checkpoint.exporter import (
    AnnouncesTensors,
    BlockStream,
    ChecksModels,
    EarlyStream,
    EncodingStream,
    Exporter,
    ExportOptions,
    ResumableExporter,
    ResumableStream,
    SharedExporter,
    SharedStream,
    StreamingExporter,
)
from quark.checkpoint.layout_reader import LayoutReader, ReadsOwnFiles, RenamesTensors, StoredConfig
from quark.checkpoint.packed_model import pack_model
from quark.checkpoint.reader import import_model_from_safetensors, map_to_quark
from quark.checkpoint.transformers_loading import register_layouts
from quark.hf.dequantizer import Dequantizer, FloatTensor, LayerCodes
from quark.modules.coded_layer import CodedLayer
from quark.modules.packed_layers import stored_tensors

__all__ = [
    "AnnouncesTensors",
    "BlockStream",
    "CheckpointContent",
    "ChecksModels",
    "CodedLayer",
    "Dequantizer",
    "EarlyStream",
    "EncodingStream",
    "ExportOptions",
    "Exporter",
    "FloatTensor",
    "LayerCodes",
    "LayoutReader",
    "ModelExporter",
    "ReadsOwnFiles",
    "RenamesTensors",
    "ResumableExporter",
    "ResumableStream",
    "SharedExporter",
    "SharedStream",
    "StoredConfig",
    "StreamingExporter",
    "export_safetensors",
    "import_model_from_safetensors",
    "map_to_quark",
    "pack_model",
    "register_layouts",
    "save_companions",
    "stored_tensors",
]
