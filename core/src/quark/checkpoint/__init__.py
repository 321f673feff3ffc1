"""Functions and classes that write quantized models and read them back.

The package also contains the base classes and protocols for layouts that plugins define.
"""

from quark.checkpoint.checkpoint_exporter import CheckpointExporter
from quark.checkpoint.companions import save_companions
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.export import export_safetensors
from quark.checkpoint.exported_layer import ExportedLayer
from quark.checkpoint.exporter import BlockStream, Exporter, ExportOptions
from quark.checkpoint.layer_storage import LayerStorage, StorageReader
from quark.checkpoint.layout_reader import LayoutReader, ReadsOwnFiles, StoredConfig
from quark.checkpoint.packed_model import pack_model
from quark.checkpoint.reader import import_model_from_safetensors
from quark.checkpoint.transformers_loading import map_to_quark, register_layouts
from quark.config.layer import Slot
from quark.models.hf.dequantizer import Dequantizer, FloatTensor, LayerCodes
from quark.models.hf.loading import running_from_codes, unpack_model
from quark.models.layers.coded_layer import CodedLayer, stored_tensors

__all__ = [
    "BlockStream",
    "CheckpointContent",
    "CheckpointExporter",
    "CodedLayer",
    "Dequantizer",
    "ExportOptions",
    "ExportedLayer",
    "Exporter",
    "FloatTensor",
    "LayerCodes",
    "LayerStorage",
    "LayoutReader",
    "ReadsOwnFiles",
    "Slot",
    "StorageReader",
    "StoredConfig",
    "export_safetensors",
    "import_model_from_safetensors",
    "map_to_quark",
    "pack_model",
    "register_layouts",
    "running_from_codes",
    "save_companions",
    "stored_tensors",
    "unpack_model",
]
