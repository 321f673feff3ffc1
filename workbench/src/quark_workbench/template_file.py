"""Reader of model family templates in JSON files. Each field is checked, and no code is executed."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from quark.base.lazy import LazyRef
from quark.base.names import closest
from quark.config.architecture import Architecture
from quark.config.fields import json_of
from quark.config.templates.algorithms import algo_config_from_dict, canonical_algorithm
from quark.config.templates.template import PATTERNS, LLMTemplate
from quark.errors import ConfigError, QuarkError
from quark.plugins import templates

__all__ = ["read_template_file", "register_template_file"]

_OWN = ("base", "algorithm_configs")
"""Keys in addition to those of `Architecture`."""


def register_template_file(path: str | Path) -> LLMTemplate:
    """Register the template in a JSON file for the rest of this process, and return it.

    The errors are those of `read_template_file`.

    To resume a run, register the same file again. A run with other facts about the family counts as another
    run.
    """
    template = read_template_file(path)
    LLMTemplate.register_template(template)
    return template


def read_template_file(path: str | Path) -> LLMTemplate:
    """Return the template that a JSON file describes.

    The file contains one JSON object. Its keys are names of attributes of
    `quark.config.architecture.Architecture`, of which only ``model_type`` is required. Two more keys are
    allowed:

    - ``base``: the model type of an installed template. Facts that the file lacks come from this template.
    - ``algorithm_configs``: an object from name of algorithm to settings. The settings are an object with the
      key ``name``.

    AMD Quark's template files can be read too. If the file has only patterns, quark infers the structure of
    the family from the modules of a model.

    Args:
        path: The file.

    Raises:
        ConfigError: (a ValueError) The file or a field is invalid. The message names the file and the field.
    """
    path = Path(path)
    data = json_of(path, "template file")
    try:
        return _template(data)
    except (QuarkError, TypeError, ValueError) as error:
        raise ConfigError(f"the template file '{path}' cannot be used: {error}") from error


def _template(data: Any) -> LLMTemplate:
    if not isinstance(data, Mapping):
        raise ConfigError(f"it holds a {type(data).__name__}: write one object")
    hints = get_type_hints(Architecture)
    for key in data:
        if key not in hints and key not in _OWN:
            near = closest(key, [*hints, *_OWN])
            raise ConfigError(f"it has an unknown field '{key}'" + (f"; did you mean '{near}'?" if near else ""))
    if not isinstance(data.get("model_type"), str) or not data["model_type"]:
        raise ConfigError("its field 'model_type' is missing or is not a text: give the model's config.model_type, such as \"llama\"")
    facts = {key: _value(value, hints[key], key) for key, value in data.items() if key not in _OWN}
    settings, base_name = _settings(data.get("algorithm_configs")), _value(data.get("base"), str | None, "base")
    if base_name is None and all(key in ("model_type", *PATTERNS) for key in facts):
        return LLMTemplate(**facts, algorithm_configs=settings)
    base = Architecture(model_type=facts["model_type"]) if base_name is None else templates().load_architecture(base_name)
    template = LLMTemplate.from_architecture(attrs.evolve(base, **facts))
    template.algo_config |= settings
    return template


def _settings(data: Any) -> dict[str, Any]:
    settings = {}
    for name, own in _value(data, Mapping[str, Mapping[str, Any]], "algorithm_configs").items() if data is not None else ():
        try:
            algorithm, config = canonical_algorithm(name), algo_config_from_dict(own)
        except (QuarkError, TypeError, ValueError) as error:
            raise ConfigError(f"its field 'algorithm_configs.{name}' cannot be read: {error}") from error
        if canonical_algorithm(config.name) != algorithm:
            raise ConfigError(f"its field 'algorithm_configs.{name}' has settings of '{config.name}'")
        settings[algorithm] = config
    return settings


def _value(value: Any, hint: Any, field: str) -> Any:
    """Convert a JSON value to the type ``hint`` of a field, and return it. Lists become tuples.

    Raises ConfigError, with the name of the field, if the value has another type.
    """
    kind, arguments = get_origin(hint), get_args(hint)
    if hint is Any or (hint is type(None) and value is None):
        return value
    if hint in (str, bool, int) and type(value) is hint:
        return value
    if kind is Literal and value in arguments:
        return value
    if kind in (Union, types.UnionType):
        for each in arguments:
            try:
                return _value(value, each, field)
            except ConfigError:
                continue
    if kind is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            return tuple(_value(v, arguments[0], f"{field}[{i}]") for i, v in enumerate(value))
        if len(value) == len(arguments):
            return tuple(_value(v, one, f"{field}[{i}]") for i, (v, one) in enumerate(zip(value, arguments, strict=True)))
    if isinstance(kind, type) and issubclass(kind, Mapping) and isinstance(value, Mapping):
        return {key: _value(v, arguments[1], f"{field}.{key}") for key, v in value.items()}
    if kind is tuple and arguments == (str, ...) and isinstance(value, str):
        return (value,)
    raise ConfigError(f"its field '{field}' is {value!r}: give {_wanted(hint)}")


def _wanted(hint: Any) -> str:
    """Return words for the values that a field of the type ``hint`` accepts."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_wanted, arguments)))
    if kind is Literal:
        return " or ".join(f'"{one}"' for one in arguments)
    if kind is tuple:
        return f"a list of {'texts' if arguments == (str, ...) else 'lists' if arguments[-1] is Ellipsis else len(arguments)}"
    words = {
        str: "a text",
        bool: "true or false",
        int: "a whole number",
        type(None): "null",
        LazyRef: "code, which only a base template has,",
    }
    return words.get(hint, "an object")
