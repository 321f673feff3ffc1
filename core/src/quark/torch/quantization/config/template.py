"""``quark.torch.quantization.config.template``: templates and schemes; the scheme classes come from plugins."""

from __future__ import annotations

from typing import Any

from quark.templates import LLMTemplate as LLMTemplate
from quark.templates import QuantizationScheme as QuantizationScheme
from quark.templates import QuantizationSchemeCollection as QuantizationSchemeCollection
from quark.torch.documented import documented_name, documented_names

_TABLE = {"DEFAULT_TEMPLATES": "quark.templates.documented:DEFAULT_TEMPLATES"}
_PRIVATE = {
    "_create_template_from_config": "quark.templates.documented:template_from_dict",
    "_resolve_projection_base_spec": "quark.templates.documented:projection_base",
    "_ATTN_TOKENS": "quark.templates.documented:ATTENTION_TOKENS",
}
"""Documented with the module, though not public."""


def __getattr__(name: str) -> Any:
    return documented_name(__name__, name, _TABLE | _PRIVATE, plugins=True)


def __dir__() -> list[str]:
    return documented_names(__name__, _TABLE, plugins=True)
