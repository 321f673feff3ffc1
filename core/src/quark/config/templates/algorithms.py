"""Functions that return settings of an algorithm: from its name, from JSON, or for a model family.

Plugins provide the algorithms.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs

from quark.base.log import get_logger
from quark.base.names import closest
from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.errors import ConfigError, UnknownNameError, UnsupportedError
from quark.plugins import algorithms
from quark.plugins.options import called, checked, settings_options

_CONFIG_SUFFIX = "_config"
_LEGACY_KEYS = frozenset({"num_attention_heads", "num_key_value_heads"})
"""Keys of older configuration files that are ignored. The configuration of the model has these facts."""


def canonical_algorithm(name: str) -> str:
    """Return the registered name of an algorithm. ``name`` is this name or an alias, in upper or lower case.

    Raises:
        UnknownNameError: (a ValueError) There is no such algorithm. The message names the closest match.
    """
    try:
        return algorithms().get(str(name).lower()).name
    except UnknownNameError as error:
        message = f"Unsupported algorithm: {name}; {error}"
        raise UnknownNameError(message, kind="algorithm", name=str(name), known=error.known) from None


def require_processor(name: str, named_in: str = "`algorithm`") -> None:
    """Raise UnsupportedError if an algorithm cannot run, because its distribution provides only settings.

    Args:
        name: Name of the algorithm.
        named_in: The argument or field that contains the name. The message contains this text.

    Raises:
        UnsupportedError: (a NotImplementedError) The record of the algorithm has no ``processor``. The
            message names the distribution.
    """
    if algorithms().get(name).processor is None:
        source = algorithms().source(name)
        raise UnsupportedError(
            f"the algorithm '{name}' cannot run: {source.distribution} {source.version} registers its configuration only. "
            f"Leave {named_in} out, or install a distribution that provides its processor"
        )


def derived_config(name: str, architecture: Architecture) -> AlgoConfig | None:
    """Return the settings that an algorithm derives from the facts about a model family.

    Return None if the algorithm cannot derive settings. Settings in ``architecture.algorithm_defaults``
    replace the defaults of the algorithm.
    """
    config_class = algorithms().load_config(name)
    if refusal(name, architecture) is not None:
        return None
    derived = config_class.for_architecture(architecture)
    return derived if derived is None else attrs.evolve(derived, **architecture.algorithm_defaults.get(name, {}))


def refusal(name: str, architecture: Architecture) -> str | None:
    """Return the reason why an algorithm cannot be applied to a family, or None if no reason is known."""
    config_class = algorithms().load_config(name)
    return architecture.unsupported.get(name) or config_class.refusal(architecture)


def with_options(name: str, settings: AlgoConfig, options: Mapping[str, Any]) -> AlgoConfig:
    """Return a copy of an algorithm's settings with the values in ``options``.

    Raises:
        ConfigError: (a ValueError) The algorithm has no such option, or refuses the value of an option. The
            message lists the options of the algorithm.
    """
    whose = f"the algorithm '{name}'"
    values = checked(whose, settings_options(type(settings)), options)
    return called(whose, functools.partial(attrs.evolve, settings), values)


def algo_config_from_dict(data: Mapping[str, Any]) -> AlgoConfig:
    """Create settings of an algorithm from their JSON form. ``data["name"]`` is the algorithm's name.

    Raises:
        UnknownNameError: (a ValueError) No installed distribution has an algorithm with this name.
        ConfigError: The name or a required key is missing, or a key is unknown.
    """
    if not isinstance(data.get("name"), str):
        raise ConfigError("the configuration of an algorithm has no key 'name': add the name of the algorithm, as in {\"name\": …}")
    try:
        config_class = algorithms().load_config(data["name"])
    except UnknownNameError as error:
        raise error.saying(f"Unknown algorithm name {data['name']!r}; {error}") from None
    values = {key: value for key, value in data.items() if key not in _LEGACY_KEYS}
    known = {a.name for a in attrs.fields(config_class)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"the configuration of '{data['name']}' has unknown keys {unknown}; its keys are {', '.join(sorted(known))}")
    needed = [a.name for a in attrs.fields(config_class) if a.init and a.default is attrs.NOTHING]
    if missing := [name for name in needed if name not in values]:
        raise ConfigError(f"the configuration of '{data['name']}' lacks the keys {', '.join(missing)}")
    return config_class.from_dict(values)


def by_algorithm(configs: Mapping[str, AlgoConfig | None] | None, where: str) -> dict[str, AlgoConfig | None]:
    """Return a copy of ``configs`` in which registered names replace aliases of algorithms.

    ``where`` is the name of the argument that contains ``configs``. Messages contain this name.
    """
    try:
        return {canonical_algorithm(name): config for name, config in (configs or {}).items()}
    except UnknownNameError as error:
        raise error.saying(f"Unsupported algorithm '{error.name}' in {where}; {error}") from None


def legacy_settings(parameters: Mapping[str, AlgoConfig | None]) -> dict[str, AlgoConfig | None]:
    """Convert keywords of the form ``<algorithm>_config`` to a dictionary from algorithm to settings.

    Raise ConfigError if there is another keyword.
    """
    if not parameters:
        return {}
    known = [f"{name}{_CONFIG_SUFFIX}" for name in algorithms().names()]
    for keyword in parameters:
        if keyword not in known:
            near = closest(keyword, [*known, "kv_layers_name", "exclude_layers_name", "q_layer_name", "gate_up_layers_name"])
            raise ConfigError(
                f"Unsupported legacy algorithm keyword '{keyword}'.{f' Did you mean {near}?' if near else ''} "
                f"The known keywords are {', '.join(known) or 'none, since no algorithm is installed'}. "
                "New code uses `algorithm_configs`"
            )
    get_logger(__name__).warning(
        f"Deprecated keyword arguments of LLMTemplate: {', '.join(sorted(parameters))}. "
        "Write algorithm_configs={'<algorithm>': …} instead; both are understood in this version."
    )
    return {keyword.removesuffix(_CONFIG_SUFFIX): config for keyword, config in parameters.items()}
