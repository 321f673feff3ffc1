"""Restorers. When a checkpoint is read, a restorer adds the parts of an algorithm to the model again.

Such parts are hooks, for example.
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
    """The protocol of objects that add the parts of one algorithm, such as hooks, to a model again.

    quark creates the object with one argument: the settings of the algorithm in the checkpoint.
    """

    def restore(self, model: nn.Module, config: QConfig) -> None:
        """Add to a float model the parts that the algorithm added before the export.

        quark calls this method after it has separated experts, and before it replaces layers and loads
        tensors. When quark replaces a layer, the hooks of the layer are kept. If the checkpoint contains
        tensors of this algorithm, this method must add buffers for these tensors.

        Raises:
            CheckpointError: The settings do not fit the model.
        """

    def place_of(self, name: str, tensor: Tensor) -> str:
        """Return the full name that a stored tensor has in the restored model.

        ``name`` is the stored name. If the tensor does not belong to this algorithm, return ``name``.
        """


def restorers_of(config: QConfig) -> list[Restorer]:
    """Return a restorer for each algorithm in ``config`` that runs as part of the model.

    Raises:
        MissingPluginError: An algorithm that runs as part of the model is not installed.
        UnsupportedError: An algorithm that runs as part of the model is installed, but has no restorer.
        ConfigError: The checkpoint contains a setting that the installed algorithm does not have.
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

    If the checkpoint contains unknown tensors, they may belong to these algorithms.
    """
    return [settings.name for settings in config.algo_config or () if settings.name not in algorithms()]


def _own(settings: AlgoConfig) -> AlgoConfig:
    """Convert the settings from a checkpoint to an object of the algorithm's settings class.

    If the algorithm need not be restored, the settings may stay a `StoredAlgoConfig`.
    """
    if not isinstance(settings, StoredAlgoConfig):
        return settings
    if algorithms().get(settings.name).restorer is None and not settings.is_run:
        return settings  # there is nothing to restore, so unknown settings do no harm
    return algo_config_from_dict(settings.to_dict())
