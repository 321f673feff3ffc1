"""Algorithms with their settings: two roundings, and a transform with its own role that runs in each forward."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from quark.config.algorithm import AlgoConfig
from quark.plugins import AlgorithmRecord, hookimpl


@attrs.define(kw_only=True)
class ClippedNearestConfig(AlgoConfig):
    """Settings of `third_party.clipped_nearest.ClippedNearest`.

    Attributes:
        narrowest: Narrowest range to try ÷ the whole range.
    """

    name: str = "clipped_nearest"
    narrowest: float = 0.7


@attrs.define(kw_only=True)
class CountedNearestConfig(AlgoConfig):
    """Of `third_party.clipped_nearest.CountedNearest`."""

    name: str = "counted_nearest"


@attrs.define(kw_only=True)
class InputGainConfig(AlgoConfig):
    """Settings of `third_party.input_gain.InputGain`.

    Attributes:
        layers: Suffixes of the names of layers.
    """

    name: str = "input_gain"
    layers: list[str] = attrs.field(factory=lambda: ["mlp.down_proj"])

    def runs_with_model(self) -> bool:
        """Inputs are multiplied while the model runs."""
        return True


@hookimpl
def quark_register_algorithms() -> Iterator[AlgorithmRecord]:
    """The rounding and the transform."""
    yield AlgorithmRecord(
        name="clipped_nearest",
        summary="round to nearest under the range whose errors weigh least in the outputs",
        kind="rounding",
        config="third_party.algorithms:ClippedNearestConfig",
        processor="third_party.clipped_nearest:ClippedNearest",
        capabilities={"calibration"},
    )
    yield AlgorithmRecord(
        name="counted_nearest",
        summary="round to nearest, and count the layers: a rounding that needs no data",
        kind="rounding",
        config="third_party.algorithms:CountedNearestConfig",
        processor="third_party.clipped_nearest:CountedNearest",
    )
    yield AlgorithmRecord(
        name="input_gain",
        summary="multiply inputs of layers by powers of two while the model runs, and divide their weights",
        kind="transform",
        role="preconditioning",
        before=("equalization",),
        config="third_party.algorithms:InputGainConfig",
        processor="third_party.input_gain:InputGain",
        restorer="third_party.input_gain:InputGain",
    )
