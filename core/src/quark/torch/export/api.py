"""``quark.torch.export.api``: exporting, loading, and the entry that transformers' loader calls."""

from __future__ import annotations

from typing import Any

from quark.torch.documented import documented_name, documented_names

_TABLE = {
    "ModelExporter": "quark.checkpoint:ModelExporter",
    "export_safetensors": "quark.checkpoint:export_safetensors",
    "import_model_from_safetensors": "quark.checkpoint:import_model_from_safetensors",
}
_MAP_TO_QUARK = {"_map_to_quark": "quark.checkpoint:map_to_quark"}


def __getattr__(name: str) -> Any:
    return documented_name(__name__, name, _TABLE | _MAP_TO_QUARK)


def __dir__() -> list[str]:
    return documented_names(__name__, _TABLE)
