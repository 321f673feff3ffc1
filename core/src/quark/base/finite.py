"""Checks of tensors for NaN and Inf. They run before weights are changed and before tensors are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from quark.base.log import get_logger
from quark.base.names import folded
from quark.base.scalars import numbers
from quark.errors import NonFiniteError


def refuse_non_finite(
    tensors: Mapping[str, Tensor], buffers: Collection[str], reason: Callable[[Sequence[str]], str], *, warns: bool = True
) -> None:
    """Raise an error if a tensor contains NaN or Inf. Codes, integers and meta tensors are not checked.

    Args:
        tensors: A dictionary from full name to tensor.
        buffers: The names of the tensors that are buffers. Buffers may contain Inf, as attention masks do.
        reason: A function that gets the names of the invalid tensors and returns the cause and the fix for
            the message.
        warns: Whether to log a warning that names the buffers that contain Inf.

    Raises:
        NonFiniteError: A tensor contains NaN, or a tensor that is not a buffer contains Inf. The message
            names these tensors.
    """
    floats = {n: t.detach() for n, t in tensors.items() if t.is_floating_point() and t.itemsize > 1 and not t.is_meta}
    sums = numbers(*(_sum(x) for x in floats.values())) if floats else []
    names = [n for (n, x), total in zip(floats.items(), sums, strict=True) if not (math.isfinite(total) or bool(torch.isfinite(x).all()))]
    infinite = [n for n in names if n in buffers and not bool(floats[n].isnan().any())]
    if infinite and warns:
        get_logger(__name__).warning(
            f"{len(infinite)} buffer(s) contain Inf and are written unchanged: {folded(infinite)}. Attention masks may contain Inf. If "
            "these buffers are not masks, the checkpoint is damaged or was cast to float16, whose largest value is 65504"
        )
    if names := [n for n in names if n not in infinite]:
        raise NonFiniteError(f"NaN or Inf in {len(names)} tensor(s): {folded(names)}. {reason(names)}", tensor=names[0])


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that a checkpoint stores (parameters and persistent buffers) as a
    dictionary from full name to tensor."""
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}


def buffers_of(model: nn.Module) -> frozenset[str]:
    """Return the set of the full names of a model's buffers."""
    return frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))


def is_finite(x: Tensor) -> bool:
    """Return whether all elements are finite.

    This function first computes the sum of the elements. If the sum is finite, all elements are finite. A sum
    of finite elements can overflow, so if the sum is not finite, each element is tested.
    """
    return bool(torch.isfinite(_sum(x))) or bool(torch.isfinite(x).all())


def _sum(x: Tensor) -> Tensor:
    # Sums accumulate in float32 for any result dtype; bfloat16 has the same range, and a result in bfloat16
    # is twice as fast.
    return x.sum() if x.dtype is torch.bfloat16 else x.sum(dtype=torch.float32)
