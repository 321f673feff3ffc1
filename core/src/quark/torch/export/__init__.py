"""``quark.torch.export``: exports and their documented configuration."""

from __future__ import annotations

from typing import Any

from quark.config.export import ExporterConfig as ExporterConfig
from quark.config.export import JsonExporterConfig as JsonExporterConfig
from quark.config.export import OnnxExporterConfig as OnnxExporterConfig
from quark.torch.documented import documented_name, documented_names

_TABLE = {
    "ModelExporter": "quark.checkpoint:ModelExporter",
    "export_safetensors": "quark.checkpoint:export_safetensors",
    "import_model_from_safetensors": "quark.checkpoint:import_model_from_safetensors",
}


def __getattr__(name: str) -> Any:
    return documented_name(__name__, name, _TABLE)


def __dir__() -> list[str]:
    return documented_names(__name__, _TABLE)
