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
        rank: Rank of the product, limited by the smaller side of the weight. The product stores
            ``rank · (in + out)`` numbers in the model's dtype.
        scaling: Weights of the error: ``"abs_mean"`` takes the mean magnitude of each input channel (L²QER).
            ``"hessian"`` takes the second moment of the input, and minimizes the output error (QERA).
            ``"none"`` needs no data (LQER).
        from_weight: Whether a product is subtracted from the weight before rounding, as in SVDQuant. The
            final product is then made from the rounding error.
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
