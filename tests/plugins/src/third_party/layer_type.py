"""Layer types: a gated linear layer, a convolution with a gain, and an embedding with a factor."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import LayerTypeRecord, hookimpl


@hookimpl
def quark_register_layer_types() -> Iterator[LayerTypeRecord]:
    """Yield a layer type for each kind of layer that core quantizes."""
    yield LayerTypeRecord(
        name="gated",
        summary="a linear layer with a gain for each output",
        layer="third_party.layers:Gated",
        quantized="third_party.layers:QuantGated",
        planned_as="linear",
    )
    yield LayerTypeRecord(
        name="gained_transpose",
        summary="a transposed convolution with a gain for each output",
        layer="third_party.layers:GainedTranspose",
        quantized="third_party.layers:QuantGainedTranspose",
        planned_as="conv_transpose2d",
        transposed=True,
    )
    yield LayerTypeRecord(
        name="scaled_embedding",
        summary="an embedding times a factor",
        layer="third_party.layers:ScaledEmbedding",
        quantized="third_party.layers:QuantScaledEmbedding",
        planned_as="embedding",
        lookup=True,
    )
