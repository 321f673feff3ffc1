"""Settings of the algorithms of this distribution; like its plugins, without torch."""

from __future__ import annotations

import attrs

from quark.config.algorithm import AlgoConfig


@attrs.define(kw_only=True)
class ClippedNearestConfig(AlgoConfig):
    """Of `third_party.clipped_nearest.ClippedNearest`.

    Attributes:
        narrowest: Of the ranges that are tried, as a share of the whole one.
    """

    name: str = "clipped_nearest"
    narrowest: float = 0.7


@attrs.define(kw_only=True)
class CountedNearestConfig(AlgoConfig):
    """Of `third_party.clipped_nearest.CountedNearest`."""

    name: str = "counted_nearest"


@attrs.define(kw_only=True)
class InputGainConfig(AlgoConfig):
    """Of `third_party.input_gain.InputGain`.

    Attributes:
        layers: Ends of the names of layers.
    """

    name: str = "input_gain"
    layers: list[str] = attrs.field(factory=lambda: ["mlp.down_proj"])

    def runs_with_model(self) -> bool:
        """Inputs are multiplied while the model runs."""
        return True
