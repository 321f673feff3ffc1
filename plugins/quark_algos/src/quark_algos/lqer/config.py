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
        rank: Rank of the product. It cannot be larger than the smaller side of the weight. The product stores
            ``rank · (in + out)`` numbers in the model's dtype.
        scaling: How the errors of input channels are weighted. ``"abs_mean"`` uses the mean magnitude of the
            channel (L²QER). ``"hessian"`` uses the second moment of the input, which minimizes the output
            error (QERA). ``"none"`` weights all channels equally and needs no data (LQER).
        from_weight: Whether a low-rank product is subtracted from the weight before the weight is rounded, as
            in SVDQuant. The final product then approximates the difference between the original and the
            rounded weight.
    """

    name: str = "lqer"
    rank: Annotated[int, OptionNote(examples=(4, 8, 16))] = attrs.field(default=32, validator=[validators.instance_of(int), positive])
    scaling: str = attrs.field(default="hessian", validator=validators.in_(SCALINGS))
    from_weight: bool = False

    def runs_with_model(self) -> bool:
        """Return True, because the products are computed while the model runs."""
        return True

    def separates_experts(self) -> bool:
        """Return True, because each expert has its own products."""
        return True
