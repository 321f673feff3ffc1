"""Scales of the KV cache: which ones it may have, which layers share a scale, and the merged scale.

Calibration and exporters merge with the last two functions.
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
    """Return whether every level of a spec has one scale per tensor."""
    return all(level.qscheme is QSchemeType.per_tensor for level in levels(spec))


def is_per_head(level: QTensorConfig) -> bool:
    """Return whether keys and values ``[batch, heads, tokens, elements]`` have a scale for each head."""
    return level.qscheme is QSchemeType.per_channel and level.ch_axis == 1


def why_not_cached(spec: TensorSpec, heads: tuple[int, int] | None) -> str | None:
    """Return why keys or values cannot be quantized inside attention, as a predicate; None if they can.

    A static scale may belong to a head, but not to a sequence or a position, because their number varies.

    Args:
        spec: Their quantization.
        heads: Number of heads, and elements of one; None if they are not known.
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
    """Return the layers that feed the KV cache, in groups that share a scale.

    A group has the keys and values of one attention.

    Args:
        names: Full names of layers with one static scale for their output.
        patterns: Patterns of layers that feed the cache.
        separate: Whether each layer keeps its own scale.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if first_match(name, patterns) is not None:
            groups.setdefault(name if separate else name.rpartition(".")[0], []).append(name)
    return [tuple(members) for members in groups.values()]


def merge_kv_scales(scales: Sequence[Tensor], floor: float) -> Tensor:
    """Return the largest of some scales, element by element, but at least ``floor``.

    All have the same number of elements. If their shapes are ``[]`` and ``[1]``, the result has ``[]``.
    """
    shape = min((scale.shape for scale in scales), key=len)
    return torch.stack([scale.reshape(shape) for scale in scales]).amax(dim=0).clamp(min=floor)
