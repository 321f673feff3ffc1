# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark_amd.export_config import ExporterConfig as ExporterConfig
from quark_amd.export_config import JsonExporterConfig as JsonExporterConfig
from quark_amd.export_config import OnnxExporterConfig as OnnxExporterConfig
