"""Layers that come quantized and are not to be quantized: which of them stay as their checkpoint stores them, and which cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from quark.base.names import folded
from quark.config.layer import QLayerConfig
from quark.config.slot import Slot
from quark.models.hf.dequantizer import LayerCodes
from quark.models.plan.plan_row import PlanRow

__all__ = ["CodesOf", "is_left_alone", "not_kept", "with_kept"]

CodesOf = Mapping[str, LayerCodes | None]
"""The layers of a model that come quantized, by full name; None where their quantization has no exact
expression.
"""


def is_left_alone(row: PlanRow) -> bool:
    """Return whether a configuration leaves the weight and the input of a layer as they are; its output may enter a quantized cache."""
    return row.config is None or attrs.evolve(row.config, output_tensors=None) == QLayerConfig()


def with_kept(rows: Sequence[PlanRow], codes_of: CodesOf) -> tuple[PlanRow, ...]:
    """Return the rows, those that stay as they are stored with the configuration of their checkpoint."""
    return tuple(_kept(row, codes_of.get(row.name)) for row in rows)


def _kept(row: PlanRow, codes: LayerCodes | None) -> PlanRow:
    if codes is None or not is_left_alone(row) or not row.is_linear or codes.shape != row.shape or not _fits(row, codes.config):
        return row
    output = None if row.config is None else row.config.output_tensors
    config = codes.config if output is None else attrs.evolve(codes.config, output_tensors=output)
    return attrs.evolve(row, config=config, is_kept=True, reason=f"{row.reason}; stays as it is, from the source")


def _fits(row: PlanRow, config: QLayerConfig) -> bool:
    return all((spec := getattr(config, slot)) is None or row.shape_error(slot, spec) is None for slot in Slot)


def not_kept(rows: Sequence[PlanRow], codes_of: CodesOf) -> Iterator[str]:
    """Yield a warning of layers that come quantized, are not to be quantized, and cannot stay as they are."""
    known = {row.name: row for row in rows}
    floats = {name for name, row in known.items() if is_left_alone(row)}
    # A layer that the model has under another name, such as that of an expert, lies where layers stay float.
    owners = {name.rpartition(".")[0] for name in floats}
    names = [name for name in codes_of if name in floats or (name not in known and name.rpartition(".")[0] in owners)]
    if names:
        yield (
            f"{len(names)} layer(s) come quantized and are written dequantized, since their quantization has no exact expression here: "
            f"{folded(names)}. keep_prequantized_layers=False (--no-keep-prequantized) says that this is meant"
        )
