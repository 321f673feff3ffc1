"""Quantized attention in a model: the step that follows when the layers of a block have their scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from quark.model.attention import AttentionRow
from quark.nn import QuantizedLayer, QuantizerModule
from quark.nn.attention import KEY, PROBABILITIES
from quark.pipeline.observing import Observation


def quantize_attention(
    model: nn.Module, layers: Mapping[str, QuantizedLayer], attentions: Iterable[AttentionRow], seen: Iterable[Observation]
) -> None:
    """Give attention modules their quantizers, in place.

    Args:
        model: Holds the attention modules.
        layers: The quantized layers of the block by full name; a key projection hands its output quantizer on.
        attentions: What is quantized of each module.
        seen: Observations of the block; those of probabilities are used.
    """
    found = {item.layer: item for item in seen if item.slot == "prob_output"}
    for row in attentions:
        module = model.get_submodule(row.name)
        if row.probabilities is not None:
            quantizer = QuantizerModule(row.probabilities, activation=True)
            if row.name in found:
                quantizer.set_qparams(found[row.name].qparams())
            setattr(module, PROBABILITIES, quantizer)
        if row.key_layer is not None:
            projection = layers[row.key_layer]
            setattr(module, KEY, projection.output_quantizer)
            projection.output_quantizer = None
