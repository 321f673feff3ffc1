"""The registered templates as plain dictionaries, in the same format as in AMD Quark's template module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.templates.template import PATTERNS, LLMTemplate
from quark.plugins import templates
from quark.plugins.model_records import RunTimeTemplate
from quark_amd.algorithm_settings import get_algo_config, get_supported_algorithm_types

__all__ = ["ATTENTION_TOKENS", "DEFAULT_TEMPLATES", "projection_base", "template_from_dict"]

ATTENTION_TOKENS = ("self_attn", "self_attention", "attn", "attention")
"""Words that mark a pattern as a pattern of attention layers."""
_KEYS = (*PATTERNS, "f2f_weight_converters")


class _DefaultTemplates(Mapping[str, dict[str, Any]]):
    """A mapping from model type to a dictionary that describes the registered template. `template_from_dict`
    accepts such a dictionary.

    A template is loaded when a program accesses its entry.
    """

    def __getitem__(self, model_type: str) -> dict[str, Any]:
        registry = templates()
        if model_type not in registry:
            raise KeyError(model_type)
        record = registry.get(model_type)
        if isinstance(record, RunTimeTemplate):
            if record.replaces is None:
                raise KeyError(model_type)
            model_type = f"{record.replaces}:{model_type}"
        template = LLMTemplate.from_architecture(registry.load_architecture(model_type))
        return {name: getattr(template, name) for name in _KEYS}

    def __iter__(self) -> Iterator[str]:
        return iter(templates().plugin_names())

    def __len__(self) -> int:
        return len(templates().plugin_names())


DEFAULT_TEMPLATES: Mapping[str, dict[str, Any]] = _DefaultTemplates()
"""The templates of plugins. As in AMD Quark, `LLMTemplate.register_template` does not add to this mapping.
"""


def template_from_dict(model_type: str, config: Mapping[str, Any]) -> LLMTemplate:
    """Return the template that ``config``, an entry of `DEFAULT_TEMPLATES`, describes. The template includes
    settings of algorithms.
    """
    entry = {"gate_up_layers_name": None, "f2f_weight_converters": None, **config}
    settings = {name: get_algo_config(name, model_type) for name in get_supported_algorithm_types()}
    return LLMTemplate(model_type, **{name: entry[name] for name in _KEYS}, algorithm_configs=settings)


def projection_base(config: QConfig, pattern: str) -> QLayerConfig:
    """Return the configuration that AMD Quark guesses for the projections that ``pattern`` matches.

    The result is the first entry of ``layer_quant_config`` whose pattern has the same ending as ``pattern``
    or contains a word for attention. If there is no such entry, the result is the global configuration.
    Templates of this project do not guess. They use `projections.base_for`.
    """
    leaf = pattern.rpartition(".")[2].strip("*")
    named = (
        layer
        for known, layer in config.layer_quant_config.items()
        if (leaf and known.endswith(leaf)) or any(token in known for token in ATTENTION_TOKENS)
    )
    return next(named, config.global_quant_config)
