"""Check the scales of a checkpoint before anything is computed with them."""

from __future__ import annotations

import math

from torch import Tensor

from quark.errors import CheckpointError
from quark.log import get_logger
from quark.quantizers import QParams

__all__ = ["refuse_bad_scales"]


def refuse_bad_scales(qparams: QParams, of: str, *, activation: bool) -> None:
    """Raise where scales are not valid.

    A scale of 0 makes an activation infinite. A weight's group that it belongs to reads as zeros: other tools write such scales for groups
    that hold nothing but zeros, so that is logged and not refused.

    Args:
        qparams: As a checkpoint has them, unpacked.
        of: Whose they are, for messages.
        activation: Whether they are of an input or output.

    Raises:
        CheckpointError: A scale is NaN, infinite or negative; or 0, of an activation.
    """
    for scale in (qparams.scale, qparams.outer_scale):
        if scale is None or scale.is_meta or scale.numel() == 0:
            continue
        values = scale.detach().float()
        low, high = (float(v) for v in values.aminmax())
        if low > 0 and high < math.inf:  # false for NaN, which aminmax passes on
            continue
        bad = int((~((values >= 0) & (values < math.inf))).sum())
        zeros = int((values == 0).sum())
        if bad or activation:
            raise CheckpointError(
                f"{bad or zeros} of {values.numel()} scale(s) of {of} are {'NaN, infinite or negative' if bad else '0'}: the checkpoint is "
                "damaged, or was made of a model that overflowed. Make or fetch it again"
            )
        _warn_of_zeros(zeros, values, of)


def _warn_of_zeros(zeros: int, values: Tensor, of: str) -> None:
    get_logger(__name__).warning(f"{zeros} of {values.numel()} scale(s) of {of} are 0: what they belong to reads as zeros")
