"""Configurations for language models by name: templates of model families, named schemes, algorithm settings.

Imports no torch.
"""

from __future__ import annotations

from quark.config.templates.schemes import QuantizationScheme, QuantizationSchemeCollection
from quark.config.templates.template import LLMTemplate, template_for

__all__ = [
    "LLMTemplate",
    "QuantizationScheme",
    "QuantizationSchemeCollection",
    "template_for",
]
