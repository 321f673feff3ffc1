"""Which rows of a plan a rounding rounds: linear layers with quantized weights that it names; others are rounded to nearest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quark.algorithms import Rounding
from quark.names import folded
from quark.planning.decoder_blocks import owners
from quark.planning.plan_row import PlanRow

__all__ = ["block_of", "is_rounded_by", "rounded_to_nearest_by_type"]


def is_rounded_by(rounding: Rounding, row: PlanRow, blocks: Collection[str]) -> bool:
    """Return whether the rounding chooses the codes of a layer."""
    return row.is_linear and _is_named_by(rounding, row, blocks)


def rounded_to_nearest_by_type(rounding: Rounding, rows: Sequence[PlanRow], blocks: Collection[str]) -> str:
    """Return the layers that the rounding names and that are not linear, by type; empty where there are none."""
    names_of: dict[str, list[str]] = {}
    for row in rows:
        if not row.is_linear and _is_named_by(rounding, row, blocks):
            names_of.setdefault(row.layer_type, []).append(row.name)
    return ", ".join(f"{len(names)} {layer_type} layer(s) ({folded(names)})" for layer_type, names in names_of.items())


def block_of(row: PlanRow, blocks: Collection[str]) -> str | None:
    """Return the full name of the decoder block that a layer lies in."""
    return next((name for name in owners(row.name) if name in blocks), None)


def _is_named_by(rounding: Rounding, row: PlanRow, blocks: Collection[str]) -> bool:
    """Return whether the rounding would choose the codes of a layer if the layer is linear."""
    block = block_of(row, blocks) if row.has_quantized_weight and not row.is_kept else None
    return block is not None and rounding.applies_to(row.name.removeprefix(f"{block}."))
