"""Restorers put an algorithm's hooks and other additions back into a model when a checkpoint is read."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from quark.config.algorithm import AlgoConfig, StoredAlgoConfig
from quark.config.model import QConfig
from quark.config.templates.algorithms import algo_config_from_dict
from quark.errors import MissingPluginError, UnsupportedError
from quark.plugins import algorithms


class Restorer(Protocol):
    """Restores one algorithm's additions to a model.

    The class is called with the settings of the algorithm in the checkpoint.
    """

    def restore(self, model: nn.Module, config: QConfig) -> None:
        """Change a float model with separate experts, before its layers are replaced and tensors are loaded.

        Hooks on layers survive the replacement. Tensors that the checkpoint holds for this algorithm need
        buffers in the model.

        Raises:
            CheckpointError: The settings do not fit the model.
        """

    def place_of(self, name: str, tensor: Tensor) -> str:
        """Return the full name of a checkpoint's tensor in the restored model.

        For tensors of other algorithms, return ``name``.
        """


def restorers_of(config: QConfig) -> list[Restorer]:
    """Return a restorer for each algorithm of a checkpoint that runs with the model.

    Raises:
        MissingPluginError: An algorithm that runs with the model is not installed.
        UnsupportedError: An algorithm that runs with the model is installed, but has no restorer.
        ConfigError: The checkpoint has settings that the algorithm does not have.
    """
    restorers: list[Restorer] = []
    for settings in config.algo_config or ():
        if settings.name not in algorithms():
            if settings.runs_with_model():
                raise MissingPluginError(
                    f"the model needs the algorithm '{settings.name}' to run, and no installed distribution provides it. "
                    f"Run pip install {algorithms().kind.distribution}, or install another distribution that registers '{settings.name}'"
                )
            continue
        if algorithms().get(settings.name).kind == "branch":
            continue  # `pack_model` puts branches back
        own = _own(settings)
        if own.runs_with_model():
            if algorithms().get(settings.name).restorer is None:
                source = algorithms().source(settings.name)
                raise UnsupportedError(
                    f"the model needs the algorithm '{settings.name}' to run, and {source.distribution} {source.version} cannot restore "
                    f"it: install a later version"
                )
            restorers.append(algorithms().load_restorer(settings.name)(own))
    return restorers


def missing_algorithms(config: QConfig) -> list[str]:
    """Return the names of the algorithms of a checkpoint that are not installed.

    Unknown tensors may belong to them.
    """
    return [settings.name for settings in config.algo_config or () if settings.name not in algorithms()]


def _own(settings: AlgoConfig) -> AlgoConfig:
    """Return the settings of a checkpoint as an object of the algorithm's settings class."""
    if not isinstance(settings, StoredAlgoConfig):
        return settings
    if algorithms().get(settings.name).restorer is None and not settings.is_run:
        return settings  # nothing to restore, so its settings may be unknown
    return algo_config_from_dict(settings.to_dict())
