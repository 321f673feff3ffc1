# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.config.export import ExporterConfig as ExporterConfig
from quark.config.export import JsonExporterConfig as JsonExporterConfig
from quark.config.export import OnnxExporterConfig as OnnxExporterConfig
