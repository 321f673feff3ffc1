"""Keywords of `LLMTemplate` from before ``algorithm_configs``: still understood, with a warning where a newer one says the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.base.log import get_logger
from quark.base.names import closest
from quark.config.algorithm import AlgoConfig
from quark.config.templates.algorithms import get_supported_algorithm_types
from quark.errors import ConfigError

__all__ = ["legacy_settings", "one_of"]

_CONFIG_SUFFIX = "_config"


def one_of(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    """Return the one of two keywords that is given; raises ConfigError where both are."""
    if value is not None and old_value is not None:
        raise ConfigError(f"LLMTemplate is given both {name} and its old name {old_name}: keep {name}")
    return old_value if value is None else value


def legacy_settings(parameters: Mapping[str, AlgoConfig | None]) -> dict[str, AlgoConfig | None]:
    """Return settings by algorithm, of ``<algorithm>_config`` keywords; raises ConfigError for other keywords."""
    if not parameters:
        return {}
    known = [f"{name}{_CONFIG_SUFFIX}" for name in get_supported_algorithm_types()]
    for keyword in parameters:
        if keyword not in known:
            near = closest(keyword, [*known, "kv_layers_name", "exclude_layers_name", "q_layer_name", "gate_up_layers_name"])
            raise ConfigError(
                f"Unsupported legacy algorithm keyword '{keyword}'.{f' Did you mean {near}?' if near else ''} "
                f"Such keywords are written '<algorithm>_config', here: {', '.join(known) or 'none, as no algorithm is installed'}. "
                "New code uses `algorithm_configs`"
            )
    get_logger(__name__).warning(
        f"Deprecated keyword arguments of LLMTemplate: {', '.join(sorted(parameters))}. "
        "Write algorithm_configs={'<algorithm>': …} instead; both are understood in this version."
    )
    return {keyword.removesuffix(_CONFIG_SUFFIX): config for keyword, config in parameters.items()}
