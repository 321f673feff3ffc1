"""The documented processor classes, so that documents which import them run on; making one says that this version has none."""

from __future__ import annotations

from quark.errors import UnsupportedError
from quark.specs.algorithm import AlgoConfig


class MissingProcessor:
    """An algorithm's processor that this version does not bring.

    Args:
        model: As documented.
        quant_algo_config: As documented.
        calib_data: As documented.

    Raises:
        UnsupportedError: (a NotImplementedError) Always.
    """

    def __init__(self, model: object, quant_algo_config: AlgoConfig, calib_data: object = None) -> None:
        raise UnsupportedError(
            f"{type(self).__name__} cannot run: this version of quark-algos brings the algorithm's configuration only. "
            "Round-to-nearest, the default, needs no processor: leave algo_config out"
        )


class AwqProcessor(MissingProcessor):
    """Of `AWQConfig`."""


class SmoothQuantProcessor(MissingProcessor):
    """Of `SmoothQuantConfig`."""


class AutoSmoothQuantProcessor(MissingProcessor):
    """Of `AutoSmoothQuantConfig`."""


class GptqProcessor(MissingProcessor):
    """Of `GPTQConfig`."""


class GptaqProcessor(MissingProcessor):
    """Of `GPTAQConfig`."""


class QronosProcessor(MissingProcessor):
    """Of `QronosConfig`."""


class RotationProcessor(MissingProcessor):
    """Of `RotationConfig`."""
