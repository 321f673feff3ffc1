"""A number format with a qscheme that core does not know, and a scheme that uses it; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.plugins import FormatRecord, SchemeRecord, hookimpl


def strided_g32() -> QLayerConfig:
    """Return a configuration of weights 0, ±1, ±2 and ±4, with a scale for every 32 equally spaced columns."""
    weight = QTensorConfig(dtype="third_strided", qscheme="third-party.strided", group_size=32, symmetric=True, is_dynamic=False)
    return QLayerConfig(weight=weight)


@hookimpl
def quark_register_formats() -> Iterator[FormatRecord]:
    """The format that has the qscheme."""
    yield FormatRecord(
        name="third_strided", bits=8, format="third_party.strided:STRIDED_POWERS", capabilities={"third-party.strided_scales"}
    )


@hookimpl
def quark_register_schemes() -> Iterator[SchemeRecord]:
    """The scheme."""
    yield SchemeRecord(
        name="third_strided_g32",
        config="third_party.granularity:strided_g32",
        summary="Weights of 0, ±1, ±2 and ±4, 32 columns that are equally far apart to a scale",
    )
