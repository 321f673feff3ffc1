"""``quark.torch.export.api``: exporting, loading, and the entry that transformers' loader calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.compat.facade import Facade

if TYPE_CHECKING:
    from quark.checkpoint import ModelExporter, export_safetensors, import_model_from_safetensors
    from quark.torch.export.other_forms import export_gguf, export_onnx
    from quark.torch.parameters import save_params

__all__ = ["ModelExporter", "export_gguf", "export_onnx", "export_safetensors", "import_model_from_safetensors", "save_params"]

_FACADE = Facade(
    __name__,
    lazy={
        "ModelExporter": "quark.checkpoint:ModelExporter",
        "export_gguf": "quark.torch.export.other_forms:export_gguf",
        "export_onnx": "quark.torch.export.other_forms:export_onnx",
        "export_safetensors": "quark.checkpoint:export_safetensors",
        "import_model_from_safetensors": "quark.checkpoint:import_model_from_safetensors",
        "save_params": "quark.torch.parameters:save_params",
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
