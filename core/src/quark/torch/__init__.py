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

__all__ = ["LLMTemplate", "ModelExporter", "ModelQuantizer", "QuantFlow", "export_safetensors", "import_model_from_safetensors"]

_FACADE = Facade(
    __name__,
    own=("LLMTemplate", "QuantFlow"),
    lazy={
        "ModelExporter": "quark.checkpoint:ModelExporter",
        "ModelQuantizer": "quark.runs:ModelQuantizer",
        "export_safetensors": "quark.checkpoint:export_safetensors",
        "import_model_from_safetensors": "quark.checkpoint:import_model_from_safetensors",
    },
)

install()


def __getattr__(name: str) -> Any:
    return _FACADE.load(name)


def __dir__() -> list[str]:
    return _FACADE.names()
