"""Validation of the scales of a checkpoint, before they are used."""

from __future__ import annotations

import math

from torch import Tensor

from quark.base.log import get_logger
from quark.errors import CheckpointError
from quark.numbers import QParams

__all__ = ["refuse_bad_scales"]


def refuse_bad_scales(qparams: QParams, of: str, *, activation: bool) -> None:
    """Check that scales are valid.

    With a scale of 0 an activation becomes infinite, and a group of a weight dequantizes to zeros. Other
    tools write such scales for groups of zeros, so a 0 among a weight's scales is logged and not refused.

    Args:
        qparams: Unpacked scales of a checkpoint.
        of: Name of the tensor, for messages.
        activation: Whether the tensor is an input or output.

    Raises:
        CheckpointError: A scale is NaN, infinite or negative; or a scale of an activation is 0.
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
                "damaged, or the quantized model overflowed. Make or fetch it again"
            )
        _warn_of_zeros(zeros, values, of)


def _warn_of_zeros(zeros: int, values: Tensor, of: str) -> None:
    get_logger(__name__).warning(f"{zeros} of {values.numel()} scale(s) of {of} are 0: their groups dequantize to zeros")
