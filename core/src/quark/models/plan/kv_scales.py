"""Functions for the scales of the KV cache.

They decide which scales a cache may have and which layers share a scale, and they merge shared scales.
Calibration and exporters use `kv_scale_groups` and `merge_kv_scales`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quark.config.enums import QSchemeType
from quark.config.layer import TensorSpec, levels
from quark.config.tensor import QTensorConfig
from quark.models.plan.rules import first_match
from quark.numbers import quantizer_for


def is_per_tensor(spec: TensorSpec) -> bool:
    """Return whether every level of a spec has a single scale for the whole tensor."""
    return all(level.qscheme is QSchemeType.per_tensor for level in levels(spec))


def is_per_head(level: QTensorConfig) -> bool:
    """Return whether ``level``, a level of the spec of keys or values, has one scale for each head.

    Keys and values have the shape ``[batch, heads, tokens, elements]``.
    """
    return level.qscheme is QSchemeType.per_channel and level.ch_axis == 1


def why_not_cached(spec: TensorSpec, heads: tuple[int, int] | None) -> str | None:
    """Return the reason why keys or values cannot be quantized inside attention, or None if they can be.

    The result is a phrase without a subject, such as "must have one scale per tensor …". A static scale for
    each head is allowed. A static scale for each sequence or position is not allowed, because the number of
    sequences and positions varies.

    Args:
        spec: Quantization of the keys or values.
        heads: A pair: the number of heads, and the number of elements of a head. None if these numbers are
            unknown.
    """
    if is_per_tensor(spec):
        return None
    if heads is None:
        return "must have one scale per tensor, because the module does not show its heads"
    quantizer, (count, size) = quantizer_for(spec, activation=True), heads
    if (error := quantizer.shape_error((1, count, 1, size))) is not None:
        return f"do not fit heads of {size} elements: {error}"
    one, more = (quantizer.empty_qparams((n, count, n, size), "meta").scale.shape for n in (1, 2))
    if quantizer.is_dynamic or one == more:
        return None
    return "must have one scale per tensor, or one per head (qscheme per_channel, ch_axis=1)"


def kv_scale_groups(names: Iterable[str], patterns: Sequence[str], *, separate: bool = False) -> list[tuple[str, ...]]:
    """Return groups of the layers that compute keys and values for the KV cache. A group shares one scale.

    A group contains the full names of the layers that compute the keys and values of one attention module.

    Args:
        names: Full names of layers whose output has one static scale.
        patterns: Patterns that match the layers that compute keys or values for the cache.
        separate: Whether each layer has its own scale. If so, each group has one layer.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if first_match(name, patterns) is not None:
            groups.setdefault(name if separate else name.rpartition(".")[0], []).append(name)
    return [tuple(members) for members in groups.values()]


def merge_kv_scales(scales: Sequence[Tensor], floor: float) -> Tensor:
    """Return the elementwise maximum of ``scales``. Elements smaller than ``floor`` become ``floor``.

    All scales must have the same number of elements. If some scales have the shape ``[]`` and the other
    scales have the shape ``[1]``, the result has the shape ``[]``.
    """
    shape = min((scale.shape for scale in scales), key=len)
    return torch.stack([scale.reshape(shape) for scale in scales]).amax(dim=0).clamp(min=floor)
