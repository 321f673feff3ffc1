"""``quark.torch.export``: exports and their configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.compat.facade import Facade
from quark.config.export import ExporterConfig, JsonExporterConfig, OnnxExporterConfig

if TYPE_CHECKING:
    from quark.checkpoint import ModelExporter, export_safetensors, import_model_from_safetensors

__all__ = [
    "ExporterConfig",
    "JsonExporterConfig",
    "ModelExporter",
    "OnnxExporterConfig",
    "export_safetensors",
    "import_model_from_safetensors",
]

_FACADE = Facade(
    __name__,
    own=("ExporterConfig", "JsonExporterConfig", "OnnxExporterConfig"),
    lazy={
        "ModelExporter": "quark.checkpoint:ModelExporter",
        "export_safetensors": "quark.checkpoint:export_safetensors",
        "import_model_from_safetensors": "quark.checkpoint:import_model_from_safetensors",
    },
)


def __getattr__(name: str) -> Any:
    return _FACADE.load(name)


def __dir__() -> list[str]:
    return _FACADE.names()
