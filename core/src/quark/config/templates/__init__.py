"""Configurations for language models by name: templates of model families, named schemes, algorithm settings.

Imports no torch.
"""

from __future__ import annotations

from quark.base.lazy import make_callable
from quark.config.templates.algorithms import get_algo_config, get_supported_algorithm_types, load_quant_algo_config_from_file
from quark.config.templates.schemes import QuantizationScheme, QuantizationSchemeCollection
from quark.config.templates.template import LLMTemplate, template_for
from quark.config.templates.template_file import read_template_file, register_template_file
from quark.plugins import templates

__all__ = [
    "LLMTemplate",
    "QuantizationScheme",
    "QuantizationSchemeCollection",
    "get_algo_config",
    "get_supported_algorithm_types",
    "load_quant_algo_config_from_file",
    "read_template_file",
    "register_template_file",
    "template_for",
]

make_callable(__name__, templates)
