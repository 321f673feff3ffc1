"""``quark.torch``: AMD Quark's public interface. Re-exports only; what imports torch is loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.compat.facade import Facade
from quark.compat.plugin_modules import install
from quark.config.enums import QuantFlow
from quark.templates import LLMTemplate

if TYPE_CHECKING:
    from quark.checkpoint import ModelExporter, export_safetensors, import_model_from_safetensors
    from quark.runs import ModelQuantizer
    from quark.torch.export.other_forms import export_gguf, export_onnx
    from quark.torch.not_offered import RuntimeOptions, disable_native_inference, enable_native_inference
    from quark.torch.parameters import load_params, save_params

__all__ = [
    "LLMTemplate",
    "ModelExporter",
    "ModelQuantizer",
    "QuantFlow",
    "RuntimeOptions",
    "disable_native_inference",
    "enable_native_inference",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "import_model_from_safetensors",
    "load_params",
    "save_params",
]

_FACADE = Facade(
    __name__,
    own=("LLMTemplate", "QuantFlow"),
    lazy={
        "ModelExporter": "quark.checkpoint:ModelExporter",
        "ModelQuantizer": "quark.runs:ModelQuantizer",
        "RuntimeOptions": "quark.torch.not_offered:RuntimeOptions",
        "disable_native_inference": "quark.torch.not_offered:disable_native_inference",
        "enable_native_inference": "quark.torch.not_offered:enable_native_inference",
        "export_gguf": "quark.torch.export.other_forms:export_gguf",
        "export_onnx": "quark.torch.export.other_forms:export_onnx",
        "load_params": "quark.torch.parameters:load_params",
        "save_params": "quark.torch.parameters:save_params",
        "export_safetensors": "quark.checkpoint:export_safetensors",
        "import_model_from_safetensors": "quark.checkpoint:import_model_from_safetensors",
    },
)

install()


def __getattr__(name: str) -> Any:
    return _FACADE.load(name)


def __dir__() -> list[str]:
    return _FACADE.names()
