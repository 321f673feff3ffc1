"""Configurations for language models by name: templates of model families, named schemes, algorithm settings.

Imports no torch.
"""

from __future__ import annotations

from quark.base.lazy import make_callable
from quark.config.templates.schemes import QuantizationScheme, QuantizationSchemeCollection
from quark.config.templates.template import LLMTemplate, template_for
from quark.plugins import templates

__all__ = [
    "LLMTemplate",
    "QuantizationScheme",
    "QuantizationSchemeCollection",
    "template_for",
]

make_callable(__name__, templates)
