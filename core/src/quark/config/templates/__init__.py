"""Templates of model families, schemes, and settings of algorithms. This package imports no torch."""

from __future__ import annotations

from quark.config.templates.schemes import QuantizationScheme, QuantizationSchemeCollection
from quark.config.templates.template import LLMTemplate, template_for

__all__ = [
    "LLMTemplate",
    "QuantizationScheme",
    "QuantizationSchemeCollection",
    "template_for",
]
