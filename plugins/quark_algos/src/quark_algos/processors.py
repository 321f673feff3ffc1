"""The processor classes of AMD Quark's public API. Each class applies one algorithm to a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from torch import nn

from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.runs import ModelQuantizer

__all__ = [
    "AutoSmoothQuantProcessor",
    "AwqProcessor",
    "GptaqProcessor",
    "GptqProcessor",
    "Processor",
    "QronosProcessor",
    "RotationProcessor",
    "SmoothQuantProcessor",
]


class Processor:
    """Quantizes a float model with one algorithm.

    Args:
        model: A float model with a `QConfig` as its ``quant_config`` attribute.
        quant_algo_config: The settings of the algorithm.
        calib_data: Calibration data, as for `quark.runs.ModelQuantizer.quantize_model`.

    Raises:
        ConfigError: (a ValueError) The model has no ``quant_config``.

    Example:
        >>> from torch import nn
        >>> GptqProcessor(nn.Linear(8, 8), None, [])
        Traceback (most recent call last):
        quark.errors.ConfigError: GptqProcessor has no scheme for this Linear. Set model.quant_config to
        a QConfig first...
    """

    def __init__(self, model: nn.Module, quant_algo_config: AlgoConfig, calib_data: Iterable[Any] | None = None) -> None:
        config = getattr(model, "quant_config", None)
        if not isinstance(config, QConfig):
            raise ConfigError(
                f"{type(self).__name__} has no scheme for this {type(model).__name__}. Set model.quant_config to a QConfig first, or use "
                f"ModelQuantizer with get_config(scheme=…, algorithm=…)"
            )
        self.model = model
        self.quant_algo_config = quant_algo_config
        self.calib_data = calib_data
        self._config = config

    def apply(self) -> None:
        """Quantize the model in place.

        This method raises the same errors as `quark.runs.ModelQuantizer.quantize_model`.
        """
        config = attrs.evolve(self._config, algo_config=[self.quant_algo_config])
        ModelQuantizer(config).quantize_model(self.model, self.calib_data)


class GptqProcessor(Processor):
    """The processor of GPTQ. Its settings are a `GPTQConfig`."""


class GptaqProcessor(Processor):
    """The processor of GPTAQ. Its settings are a `GPTAQConfig`."""


class QronosProcessor(Processor):
    """The processor of Qronos. Its settings are a `QronosConfig`."""


class AwqProcessor(Processor):
    """The processor of AWQ. Its settings are an `AWQConfig`."""


class SmoothQuantProcessor(Processor):
    """The processor of SmoothQuant. Its settings are a `SmoothQuantConfig`."""


class AutoSmoothQuantProcessor(Processor):
    """The processor of AutoSmoothQuant. Its settings are an `AutoSmoothQuantConfig`."""


class RotationProcessor(Processor):
    """The processor of rotation. Its settings are a `RotationConfig`."""
