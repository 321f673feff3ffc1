"""A quantizer with a scale structure that no built-in quantizer has, and a scheme that uses it.

This file imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.plugins import FormatRecord, SchemeRecord, hookimpl


def rows_g32() -> QLayerConfig:
    """Return a configuration of 4-bit weights in groups of 32, with 6-bit group scales and float32 row scales."""
    weight = QTensorConfig(
        dtype="third_row_scaled", qscheme="per_group", ch_axis=-1, group_size=32, symmetric=True, is_dynamic=False, scale_format="uint8"
    )
    return QLayerConfig(weight=weight)


@hookimpl
def quark_register_formats() -> Iterator[FormatRecord]:
    """The format whose specs get the quantizer."""
    yield FormatRecord(name="third_row_scaled", bits=8, format="third_party.row_scaled:ROW_SCALED_INT4")


@hookimpl
def quark_register_schemes() -> Iterator[SchemeRecord]:
    """The scheme."""
    yield SchemeRecord(
        name="third_rows_g32",
        config="third_party.quantizer:rows_g32",
        summary="Four-bit weights in groups of 32, whose scales of six bits share one for each row",
    )
