"""Number formats of four methods, and schemes that use them; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.plugins import FormatRecord, SchemeRecord, hookimpl


def powers_g32() -> QLayerConfig:
    """Weights of 0, ±1, ±2 and ±4 in groups of 32."""
    weight = QTensorConfig(dtype="third_powers", qscheme="per_group", ch_axis=-1, group_size=32, symmetric=True, is_dynamic=False)
    return QLayerConfig(weight=weight)


def ternary_g32() -> QLayerConfig:
    """Weights of 0 and ±1 in groups of 32."""
    weight = QTensorConfig(dtype="third_ternary", qscheme="per_group", ch_axis=-1, group_size=32, symmetric=True, is_dynamic=False)
    return QLayerConfig(weight=weight)


@hookimpl
def quark_register_formats() -> Iterator[FormatRecord]:
    """The formats."""
    yield FormatRecord(name="third_ternary", bits=1.6, format="third_party.formats:TERNARY")
    yield FormatRecord(name="third_powers", bits=8, format="third_party.formats:SIGNED_POWERS")


@hookimpl
def quark_register_schemes() -> Iterator[SchemeRecord]:
    """The schemes."""
    yield SchemeRecord(
        name="third_ternary_g32", config="third_party.number_format:ternary_g32", summary="Weights of 0 and ±1, groups of 32"
    )
    yield SchemeRecord(
        name="third_powers_g32", config="third_party.number_format:powers_g32", summary="Weights of 0, ±1, ±2 and ±4, in groups of 32"
    )
