"""Restorers, which put the additions of an algorithm back into a model when a checkpoint is read.

Additions are hooks, for example.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from quark.config.algorithm import AlgoConfig, StoredAlgoConfig
from quark.config.model import QConfig
from quark.config.templates.algorithms import algo_config_from_dict
from quark.errors import MissingPluginError, UnsupportedError
from quark.plugins import algorithms


class Restorer(Protocol):
    """The protocol of objects that restore the additions of one algorithm to a model.

    Quark calls the class with the settings of the algorithm from the checkpoint.
    """

    def restore(self, model: nn.Module, config: QConfig) -> None:
        """Add to a float model what the algorithm had added before the export.

        Quark calls this after it has separated experts, and before it replaces layers and loads tensors.
        Hooks on layers survive the replacement. If the checkpoint has tensors of this algorithm, this method
        must add buffers for them.

        Raises:
            CheckpointError: The settings do not fit the model.
        """

    def place_of(self, name: str, tensor: Tensor) -> str:
        """Return the full name in the restored model of the tensor that the checkpoint stores as ``name``.

        If the tensor does not belong to this algorithm, return ``name``.
        """


def restorers_of(config: QConfig) -> list[Restorer]:
    """Return a restorer for each algorithm in ``config`` that runs with the model.

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
                    f"the model needs the algorithm '{settings.name}' to run, but no installed distribution provides it. "
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
                    f"the model needs the algorithm '{settings.name}' to run, but {source.distribution} {source.version} cannot restore "
                    f"it. Install a later version"
                )
            restorers.append(algorithms().load_restorer(settings.name)(own))
    return restorers


def missing_algorithms(config: QConfig) -> list[str]:
    """Return the names of the algorithms in ``config`` that are not installed.

    Unknown tensors of the checkpoint may belong to these algorithms.
    """
    return [settings.name for settings in config.algo_config or () if settings.name not in algorithms()]


def _own(settings: AlgoConfig) -> AlgoConfig:
    """Return the settings of a checkpoint as an object of the algorithm's settings class."""
    if not isinstance(settings, StoredAlgoConfig):
        return settings
    if algorithms().get(settings.name).restorer is None and not settings.is_run:
        return settings  # there is nothing to restore, so unknown settings do no harm
    return algo_config_from_dict(settings.to_dict())
