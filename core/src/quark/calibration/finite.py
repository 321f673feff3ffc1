"""Check of weights for NaN and Inf, before any weight is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from quark.base.from_device import numbers
from quark.base.names import folded
from quark.errors import NonFiniteError
from quark.models.plan.plan_row import PlanRow

__all__ = ["is_finite", "refuse_non_finite"]


def refuse_non_finite(model: nn.Module, rows: Iterable[PlanRow]) -> None:
    """Check every weight and bias that is to be quantized.

    Raises:
        NonFiniteError: A tensor holds NaN or Inf; the message names all such tensors.
    """
    tensors = {
        f"{row.name}.{name}": parameter.data
        for row in rows
        for name, parameter in model.get_submodule(row.name).named_parameters(recurse=False)
        if not parameter.is_meta
    }
    sums = numbers(*(_sum(x) for x in tensors.values())) if tensors else []
    names = [n for (n, x), total in zip(tensors.items(), sums, strict=True) if not (math.isfinite(total) or bool(torch.isfinite(x).all()))]
    if names:
        raise NonFiniteError(
            f"NaN or Inf in {len(names)} tensor(s): {folded(names)}. Nothing has been changed. The checkpoint is damaged or comes "
            "from a diverged run; repair it, or exclude these layers",
            tensor=names[0],
        )


def is_finite(x: Tensor) -> bool:
    """Return whether no element is NaN or infinite.

    The tensor is read once: NaN and Inf survive a sum. A sum may also overflow by itself, so the elements are
    tested if it is not finite.
    """
    return bool(torch.isfinite(_sum(x))) or bool(torch.isfinite(x).all())


def _sum(x: Tensor) -> Tensor:
    # Sums accumulate in float32 for any result dtype; bfloat16 has the same range, and a result in bfloat16
    # is twice as fast.
    return x.sum() if x.dtype is torch.bfloat16 else x.sum(dtype=torch.float32)
