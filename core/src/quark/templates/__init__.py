"""Configurations for language models by name: templates of model families, named schemes, algorithm settings. Imports no torch."""

from __future__ import annotations

from quark.lazy import make_callable
from quark.plugins import templates
from quark.templates.algorithms import get_algo_config, get_supported_algorithm_types, load_quant_algo_config_from_file
from quark.templates.schemes import QuantizationScheme, QuantizationSchemeCollection
from quark.templates.template import LLMTemplate, template_for
from quark.templates.template_file import read_template_file, register_template_file

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
