"""``quark.torch``: the documented interface. Re-exports and aliases only; names of heavy rooms are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.specs.enums import QuantFlow as QuantFlow
from quark.templates import LLMTemplate as LLMTemplate
from quark.torch.documented import documented_name, documented_names
from quark.torch.plugin_modules import install as _install

if TYPE_CHECKING:
    from quark.export import ModelExporter as ModelExporter
    from quark.export import export_safetensors as export_safetensors
    from quark.export import import_model_from_safetensors as import_model_from_safetensors
    from quark.pipeline import ModelQuantizer as ModelQuantizer

_TABLE = {
    "ModelQuantizer": "quark.pipeline:ModelQuantizer",
    "ModelExporter": "quark.export:ModelExporter",
    "export_safetensors": "quark.export:export_safetensors",
    "import_model_from_safetensors": "quark.export:import_model_from_safetensors",
}

_install()


def __getattr__(name: str) -> Any:
    return documented_name(__name__, name, _TABLE)


def __dir__() -> list[str]:
    return documented_names(__name__, _TABLE)
