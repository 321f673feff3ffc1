"""Scheme of a layer's weight in the ``quantization_config`` of compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from quark.config.fields import value_of
from quark.errors import ConfigError, UnsupportedError

__all__ = ["WeightArguments", "group_of", "refuse_other_transforms", "weight_arguments"]

_READ = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
_ENDLESS = re.compile(r"[*+}][^()]*\)[*+{]")
"""A repetition of a group that ends in a repetition: matching such a regular expression can take exponential
time.
"""


@attrs.frozen
class WeightArguments:
    """How the weight of a layer is quantized.

    Attributes:
        bits: Of a code.
        symmetric: Whether codes have no zero point.
        group_size: Columns that share a scale; None for whole rows, whole tensors and blocks.
        block: Rows and columns of a block; None where there are no blocks.
    """

    bits: int = 8
    symmetric: bool = True
    group_size: int | None = None
    block: tuple[int, int] | None = None


def refuse_other_transforms(block: Mapping[str, Any]) -> None:
    """Check that a checkpoint has no format, sparsity or transform that cannot be undone here.

    Raises:
        UnsupportedError: It has; the message names it.
    """
    groups = value_of(block, "config_groups", Mapping, {})
    formats = {block.get("format"), *(group.get("format") for group in groups.values() if isinstance(group, Mapping))} - {None}
    if others := sorted(str(name) for name in formats if name not in _READ):
        raise UnsupportedError(
            f"this checkpoint is of the format '{others[0]}' of compressed-tensors; those read are {', '.join(_READ)}. Give the float "
            "checkpoint"
        )
    sparsity = value_of(block, "sparsity_config", Mapping, {}).get("format")
    if sparsity not in (None, "dense"):
        raise UnsupportedError(f"this checkpoint is stored as sparse ('{sparsity}'), which is not read: give the float checkpoint")
    if value_of(block, "transform_config", Mapping, {}).get("config_groups"):
        raise UnsupportedError(
            "this checkpoint has transforms (transform_config) that run with the model, so its weights are not those of the float model: "
            "give the float checkpoint"
        )


def group_of(block: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """Return the entry of ``config_groups`` with the weight of one layer.

    It is the one whose targets name the layer, or else one for its type.

    Args:
        block: The ``quantization_config``.
        layer: Full name of a quantized layer.

    Raises:
        ConfigError: No group is about it, or a value is of another type than it has.
    """
    groups = [group for group in value_of(block, "config_groups", Mapping, {}).values() if isinstance(group, Mapping)]
    named = [group for group in groups if any(_names(str(target), layer) for target in value_of(group, "targets", list, []))]
    by_type = [group for group in groups if any(str(target).isidentifier() for target in value_of(group, "targets", list, []))]
    group = next((group for group in (*named, *by_type) if isinstance(group.get("weights"), Mapping)), None)
    if group is None:
        raise ConfigError(f"no group of quantization_config is about '{layer}', which has scales: the checkpoint is damaged")
    return group


def weight_arguments(block: Mapping[str, Any], layer: str) -> WeightArguments:
    """Return the `WeightArguments` of one layer; arguments and errors as of `group_of`."""
    weights: Mapping[str, Any] = group_of(block, layer)["weights"]
    size, block_shape = weights.get("group_size"), weights.get("block_structure")
    is_block = isinstance(block_shape, list) and len(block_shape) == 2 and all(isinstance(n, int) and n > 0 for n in block_shape)
    return WeightArguments(
        bits=value_of(weights, "num_bits", int, 8),
        symmetric=value_of(weights, "symmetric", bool, True),
        group_size=size if isinstance(size, int) and size > 0 else None,
        block=(block_shape[0], block_shape[1]) if is_block and block_shape is not None else None,
    )


def _names(target: str, layer: str) -> bool:
    """Return whether a target is the layer's name, or a regular expression that matches it."""
    if not target.startswith("re:"):
        return target == layer
    if _ENDLESS.search(target):
        raise ConfigError(f"the target {target!r} of quantization_config may take forever to match: write it without nested repetitions")
    try:
        return re.match(target[3:], layer) is not None
    except re.error as error:
        raise ConfigError(f"the target {target!r} of quantization_config is no regular expression ({error})") from error
