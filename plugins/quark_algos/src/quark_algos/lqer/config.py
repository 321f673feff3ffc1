"""Settings of LQER."""

from __future__ import annotations

from typing import Annotated

import attrs
from attrs import validators

from quark.config.algorithm import AlgoConfig
from quark.config.fields import with_dataclass_view
from quark.plugins import OptionNote
from quark_algos.fields import positive

__all__ = ["SCALINGS", "LQERConfig"]

SCALINGS = ("hessian", "abs_mean", "none")


@with_dataclass_view
@attrs.define(kw_only=True)
class LQERConfig(AlgoConfig):
    """Settings of LQER: low-rank quantization error reconstruction.

    Attributes:
        rank: Rank of the product; at most the smaller side of the weight. It takes ``rank · (in + out)``
            numbers in the model's dtype.
        scaling: By what the error of the weight is weighed: ``"abs_mean"``, the mean magnitude of each input
            channel (L²QER); ``"hessian"``, the second moment of the input, which makes the output error of
            the layer least (QERA); or ``"none"``, which needs no data (LQER).
        from_weight: Whether the product takes its part of the weight before the rest is rounded, as in
            SVDQuant; it is made again of what rounding then leaves.
    """

    name: str = "lqer"
    rank: Annotated[int, OptionNote(examples=(4, 8, 16))] = attrs.field(default=32, validator=[validators.instance_of(int), positive])
    scaling: str = attrs.field(default="hessian", validator=validators.in_(SCALINGS))
    from_weight: bool = False

    def runs_with_model(self) -> bool:
        """Return True: the products are computed with the model."""
        return True

    def separates_experts(self) -> bool:
        """Return True: each expert has products of its own."""
        return True
