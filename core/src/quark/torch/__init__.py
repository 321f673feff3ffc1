"""``quark.torch``: the documented interface. Re-exports and aliases only; names of heavy rooms are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.config.enums import QuantFlow as QuantFlow
from quark.templates import LLMTemplate as LLMTemplate
from quark.torch.documented import documented_name, documented_names
from quark.torch.plugin_modules import install as _install

if TYPE_CHECKING:
    from quark.checkpoint import ModelExporter as ModelExporter
    from quark.checkpoint import export_safetensors as export_safetensors
    from quark.checkpoint import import_model_from_safetensors as import_model_from_safetensors
    from quark.runs import ModelQuantizer as ModelQuantizer

_TABLE = {
    "ModelQuantizer": "quark.runs:ModelQuantizer",
    "ModelExporter": "quark.checkpoint:ModelExporter",
    "export_safetensors": "quark.checkpoint:export_safetensors",
    "import_model_from_safetensors": "quark.checkpoint:import_model_from_safetensors",
}

_install()


def __getattr__(name: str) -> Any:
    return documented_name(__name__, name, _TABLE)


def __dir__() -> list[str]:
    return documented_names(__name__, _TABLE)
