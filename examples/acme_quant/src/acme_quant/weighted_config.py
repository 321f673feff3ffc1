"""AcmeWeightedConfig: the settings of acme_weighted.

This file does not import torch, because templates create settings without torch.
"""

from __future__ import annotations

import attrs
from attrs import validators

from quark.config.algorithm import AlgoConfig
from quark.errors import ConfigError

__all__ = ["AcmeWeightedConfig"]


@attrs.define(kw_only=True)
class AcmeWeightedConfig(AlgoConfig):
    """Settings of acme_weighted: the ranges to try for each group, besides the observer's range.

    Attributes:
        narrowest: The narrowest range, as a multiple of the observer's range. It must be above 0.
        widest: The widest range, as a multiple of the observer's range. It must be above ``narrowest``.
        steps: The number of ranges, including the narrowest and the widest. It must be at least 2.

    Raises:
        ConfigError: (a ValueError) ``widest`` is not more than ``narrowest``.
        ValueError: One of the numbers is not allowed.
    """

    name: str = "acme_weighted"
    narrowest: float = attrs.field(default=0.6, validator=validators.gt(0))
    widest: float = 1.2
    steps: int = attrs.field(default=13, validator=validators.ge(2))

    def __attrs_post_init__(self) -> None:
        if not self.widest > self.narrowest:
            raise ConfigError(f"{self.name}: widest={self.widest} is not above narrowest={self.narrowest}: give a larger widest")
