# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.checkpoint import ModelExporter as ModelExporter
from quark.checkpoint import export_safetensors as export_safetensors
from quark.checkpoint import import_model_from_safetensors as import_model_from_safetensors
from quark.config.export import ExporterConfig as ExporterConfig
from quark.config.export import JsonExporterConfig as JsonExporterConfig
from quark.config.export import OnnxExporterConfig as OnnxExporterConfig
