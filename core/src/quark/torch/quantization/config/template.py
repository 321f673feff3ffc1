"""``quark.torch.quantization.config.template``: templates and schemes; the scheme classes come from plugins."""

from __future__ import annotations

from typing import Any

from quark.compat.facade import Facade
from quark.templates import LLMTemplate as LLMTemplate
from quark.templates import QuantizationScheme as QuantizationScheme
from quark.templates import QuantizationSchemeCollection as QuantizationSchemeCollection

_FACADE = Facade(
    __name__,
    own=("LLMTemplate", "QuantizationScheme", "QuantizationSchemeCollection"),
    lazy={"DEFAULT_TEMPLATES": "quark.templates.documented:DEFAULT_TEMPLATES"},
    private={
        "_create_template_from_config": "quark.templates.documented:template_from_dict",
        "_resolve_projection_base_spec": "quark.templates.documented:projection_base",
        "_ATTN_TOKENS": "quark.templates.documented:ATTENTION_TOKENS",
    },
    plugins=True,
)


def __getattr__(name: str) -> Any:
    return _FACADE.load(name)


def __dir__() -> list[str]:
    return _FACADE.names()
