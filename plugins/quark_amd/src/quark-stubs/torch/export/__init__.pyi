# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.checkpoint import export_safetensors as export_safetensors
from quark.checkpoint import import_model_from_safetensors as import_model_from_safetensors
from quark_amd.export_config import ExporterConfig as ExporterConfig
from quark_amd.export_config import JsonExporterConfig as JsonExporterConfig
from quark_amd.export_config import OnnxExporterConfig as OnnxExporterConfig
from quark_amd.model_exporter import ModelExporter as ModelExporter
