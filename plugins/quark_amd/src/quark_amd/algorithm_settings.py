"""AMD Quark's functions that get the settings of an algorithm from a model family or from a JSON file."""

from __future__ import annotations

from pathlib import Path

from quark.config.algorithm import AlgoConfig
from quark.config.fields import json_of
from quark.config.templates.algorithms import algo_config_from_dict, canonical_algorithm, derived_config
from quark.errors import ConfigError
from quark.plugins import algorithms, templates

__all__ = ["get_algo_config", "get_supported_algorithm_types", "load_quant_algo_config_from_file"]


def get_supported_algorithm_types() -> list[str]:
    """Return the names of the algorithms that installed distributions register."""
    return algorithms().names()


def get_algo_config(algorithm_type: str, model_type: str) -> AlgoConfig | None:
    """Return the settings that an algorithm derives for a model family.

    Args:
        algorithm_type: Registered name of an algorithm.
        model_type: Registered name of a template.

    Returns:
        The settings, or None if the algorithm derives no settings or no template has the name ``model_type``.

    Raises:
        UnknownNameError: (a ValueError) There is no such algorithm.
    """
    name = canonical_algorithm(algorithm_type)
    architecture = templates().find_architecture(model_type)
    return None if architecture is None else derived_config(name, architecture)


def load_quant_algo_config_from_file(file_path: str | Path) -> AlgoConfig:
    """Read the settings of one algorithm from a JSON file.

    Args:
        file_path: Path of a file with a JSON object. The key ``"name"`` names the algorithm. The other keys
            are fields of the algorithm's configuration class.

    Raises:
        ConfigError: (a ValueError) The file is missing or does not have such an object, the algorithm is
            unknown, or the algorithm has no field for a key.
    """
    path = Path(file_path)
    data = json_of(path, "algorithm configuration")
    if not isinstance(data, dict):
        raise ConfigError(f"the algorithm configuration '{path}' contains a {type(data).__name__}. Write a JSON object with the key 'name'")
    return algo_config_from_dict(data)
