"""Rounding tasks: which layers are rounded together; and round-to-nearest of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quark.algorithms import HeldOut, RoundingTask, RoundToNearest, Statistic
from quark.base.ranks import ALONE, Ranks
from quark.models.layers import QuantizedLayer

__all__ = ["round_to_nearest", "rounding_tasks"]


def rounding_tasks(
    layers: Mapping[str, QuantizedLayer],
    siblings: Sequence[Sequence[str]],
    statistics: Mapping[type[Statistic], Statistic] | None = None,
    held_out: HeldOut | None = None,
    ranks: Ranks = ALONE,
) -> list[RoundingTask]:
    """Return the rounding tasks of layers: one for each spec, dtype and shared scale.

    Args:
        layers: By full name; those without a weight quantizer, or with codes already, are left out. With
            statistics, all have one input.
        siblings: Suffixes of layers that share one scale over the whole tensor.
        statistics: Of the layers' input.
        held_out: Tokens of that input which no statistic has seen.
        ranks: Those that have the same tasks.
    """
    remaining = {name: layer for name, layer in layers.items() if (q := layer.weight_quantizer) is not None and q.codes is None}
    tasks: list[RoundingTask] = []
    for suffixes in siblings:
        for name in [n for n in remaining if n.rsplit(".", 1)[-1] == suffixes[0]]:
            parent = name.removesuffix(suffixes[0])
            members = [parent + s for s in suffixes]
            if all(m in remaining and _has_tensor_scale(remaining[m]) for m in members):
                stack = {m: remaining.pop(m) for m in members}
                tasks.append(RoundingTask(stack, statistics or {}, shares_scale=True, held_out=held_out, ranks=ranks))
    alike: dict[object, dict[str, QuantizedLayer]] = {}
    for name, layer in remaining.items():
        assert layer.weight_quantizer is not None
        alike.setdefault((layer.weight_quantizer.quantizer, layer.weight.dtype, type(layer)), {})[name] = layer
    return [*tasks, *(RoundingTask(members, statistics or {}, held_out=held_out, ranks=ranks) for members in alike.values())]


def _has_tensor_scale(layer: QuantizedLayer) -> bool:
    return layer.weight_quantizer is not None and layer.weight_quantizer.quantizer.has_tensor_scale


def round_to_nearest(layers: Mapping[str, QuantizedLayer], siblings: Sequence[Sequence[str]], *, defers: bool = False) -> set[str]:
    """Round the weights of layers to nearest, siblings with one scale; return the layers' names.

    ``defers`` is as of `quark.algorithms.RoundToNearest`.
    """
    nearest = RoundToNearest(defers=defers)
    for task in rounding_tasks(layers, siblings):
        nearest.round(task)
    return set(layers)
