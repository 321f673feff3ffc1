"""``quark.torch.export.api``: exporting, loading, and the entry that transformers' loader calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.compat.facade import Facade

if TYPE_CHECKING:
    from quark.checkpoint import ModelExporter, export_safetensors, import_model_from_safetensors

__all__ = ["ModelExporter", "export_safetensors", "import_model_from_safetensors"]

_FACADE = Facade(
    __name__,
    lazy={
        "ModelExporter": "quark.checkpoint:ModelExporter",
        "export_safetensors": "quark.checkpoint:export_safetensors",
        "import_model_from_safetensors": "quark.checkpoint:import_model_from_safetensors",
    },
    private={
        "_map_to_quark": "quark.checkpoint:map_to_quark",
        "_move_quantizer_to_dict": "quark.torch.not_offered:move_quantizer_to_dict",
    },
)


def __getattr__(name: str) -> Any:
    return _FACADE.load(name)


def __dir__() -> list[str]:
    return _FACADE.names()
