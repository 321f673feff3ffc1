"""``quark.torch``: AMD Quark's public interface.

Its names are loaded on first use, as `quark.torch.import_paths` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.torch.finder import load, public_names

if TYPE_CHECKING:
    from quark.checkpoint import ModelExporter, export_safetensors, import_model_from_safetensors
    from quark.config.enums import QuantFlow
    from quark.config.templates import LLMTemplate
    from quark.runs import ModelQuantizer
    from quark.torch.not_offered import RuntimeOptions, disable_native_inference, enable_native_inference
    from quark.torch.parameters import export_gguf, export_onnx, load_params, save_params

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


def __getattr__(name: str) -> Any:
    return load(__name__, name)


def __dir__() -> list[str]:
    return public_names(__name__)
