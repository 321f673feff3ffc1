"""Refuse weights that hold NaN or Inf before any of them is changed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from quark.errors import NonFiniteError
from quark.names import folded
from quark.planning.plan import PlanRow

__all__ = ["is_finite", "refuse_non_finite"]


def refuse_non_finite(model: nn.Module, rows: Iterable[PlanRow]) -> None:
    """Check every weight and bias that is to be quantized.

    Raises:
        NonFiniteError: One holds NaN or Inf; all such tensors are named.
    """
    bad = []
    for row in rows:
        layer = model.get_submodule(row.name)
        for name, parameter in layer.named_parameters(recurse=False):
            if not parameter.is_meta and not is_finite(parameter.data):
                bad.append(f"{row.name}.{name}")
    if bad:
        raise NonFiniteError(
            f"NaN or Inf in {len(bad)} tensor(s): {folded(bad)}. Nothing has been changed. The checkpoint is damaged or comes "
            "from a diverged run; repair it, or exclude these layers",
            tensor=bad[0],
        )


def is_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    One read of the tensor: NaN and Inf survive a sum. A sum may overflow by itself, so a bad one is looked at again.
    """
    # Sums are made in float32 whatever comes out; of bfloat16, whose range is the same, the result is twice as fast in its own dtype.
    total = x.sum() if x.dtype is torch.bfloat16 else x.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(x).all())
