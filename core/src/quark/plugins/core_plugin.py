"""The plugin of quark-core, which registers layer types. It imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark.plugins.hookspecs import hookimpl
from quark.plugins.model_records import LayerTypeRecord

__all__ = ["quark_register_layer_types"]


@hookimpl
def quark_register_layer_types() -> Iterator[LayerTypeRecord]:
    """Yield the layer types of torch, and the linear layer that transformers defines."""
    yield _of_torch("linear", "Linear")
    yield LayerTypeRecord(
        name="transformers_conv1d",
        layer="transformers.pytorch_utils:Conv1D",
        quantized="quark.models.layers.quantized_layers:QuantConv1D",
        planned_as="linear",
        transposed=True,
        summary="the linear layer of GPT-2: x @ weight + bias",
    )
    # In AMD Quark, the global configuration applies to two-dimensional convolutions. In language models,
    # one-dimensional convolutions are depthwise, and no runtime quantizes such layers. Three-dimensional
    # convolutions embed patches.
    yield _of_torch("conv1d", "Conv1d", "convolutions", by_name=True)
    yield _of_torch("conv2d", "Conv2d", "convolutions")
    yield _of_torch("conv3d", "Conv3d", "convolutions", by_name=True)
    yield _of_torch("conv_transpose1d", "ConvTranspose1d", "convolutions", transposed=True, by_name=True)
    yield _of_torch("conv_transpose2d", "ConvTranspose2d", "convolutions", transposed=True)
    yield _of_torch("conv_transpose3d", "ConvTranspose3d", "convolutions", transposed=True, by_name=True)
    yield _of_torch("embedding", "Embedding", lookup=True)
    yield _of_torch("embedding_bag", "EmbeddingBag", lookup=True)
    yield LayerTypeRecord(
        name="attention_output",
        layer="torch.nn.modules.linear:NonDynamicallyQuantizableLinear",
        summary="stays float, because nn.MultiheadAttention reads the weight of this layer and never calls the layer",
    )


def _of_torch(name: str, layer: str, module: str = "quantized_layers", **facts: Any) -> LayerTypeRecord:
    quantized = f"quark.models.layers.{module}:Quant{layer}"
    return LayerTypeRecord(name=name, layer=f"torch.nn:{layer}", quantized=quantized, summary=f"torch.nn.{layer}", **facts)
