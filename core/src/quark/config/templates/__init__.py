"""Templates of model families, and look-up of schemes and settings of algorithms by name, without torch."""

from __future__ import annotations

from quark.config.templates.schemes import QuantizationScheme, QuantizationSchemeCollection
from quark.config.templates.template import LLMTemplate, template_for

__all__ = [
    "LLMTemplate",
    "QuantizationScheme",
    "QuantizationSchemeCollection",
    "template_for",
]
