"""Budget: what a selection may spend: bits per weight, bytes of the checkpoint, or divergence from the float model."""

from __future__ import annotations

import math
from typing import Any

import attrs

from quark.errors import ConfigError

__all__ = ["Budget"]


def _positive(_: object, attribute: Any, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(f"a budget of {attribute.name}={value} leaves nothing to choose from: give a positive number")


@attrs.frozen(kw_only=True)
class Budget:
    """A budget. Exactly one attribute is given.

    Attributes:
        bits: Most stored bits per weight, over the layers that are chosen for; codes and scales count, what
            stays float by the template of the family, such as the output head, does not.
        size: Most bytes of all tensors of the checkpoint.
        kl: Largest mean KL divergence from the float model on the calibration tokens, in nats per token.

    Raises:
        ConfigError: None, or several, are given, or one is not positive.
    """

    bits: float | None = attrs.field(default=None, validator=_positive)
    size: int | None = attrs.field(default=None, validator=_positive)
    kl: float | None = attrs.field(default=None, validator=_positive)

    def __attrs_post_init__(self) -> None:
        values = (("bits", self.bits), ("size", self.size), ("kl", self.kl))
        given = [name for name, value in values if value is not None]
        if len(given) != 1:
            said = "none is given" if not given else f"{' and '.join(given)} are given"
            raise ConfigError(f"a selection has one budget, and {said}: give bits per weight, a size in bytes, or a KL divergence")

    def __str__(self) -> str:
        if self.bits is not None:
            return f"{self.bits:g} bits per weight"
        return f"{self.size:,} bytes" if self.size is not None else f"a KL divergence of {self.kl:g} nats per token"
