"""A layer type: `third_party.gated.Gated`, which is quantized by every scheme and rounded by whatever rounds linear layers."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import LayerTypeRecord, hookimpl


@hookimpl
def quark_register_layer_types() -> Iterator[LayerTypeRecord]:
    """The gated linear layer."""
    yield LayerTypeRecord(
        name="gated",
        summary="a linear layer with a gain for each output",
        layer="third_party.gated:Gated",
        quantized="third_party.gated:QuantGated",
        planned_as="linear",
    )
