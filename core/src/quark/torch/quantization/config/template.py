"""``quark.torch.quantization.config.template``: templates and schemes; the scheme classes come from plugins."""

from __future__ import annotations

from typing import Any

from quark.templates import LLMTemplate as LLMTemplate
from quark.templates import QuantizationScheme as QuantizationScheme
from quark.templates import QuantizationSchemeCollection as QuantizationSchemeCollection
from quark.torch.documented import documented_name, documented_names


def __getattr__(name: str) -> Any:
    return documented_name(__name__, name, {}, plugins=True)


def __dir__() -> list[str]:
    return documented_names(__name__, {}, plugins=True)
