"""What quark-core registers: the layer types of torch and transformers. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins.hookspecs import hookimpl
from quark.plugins.records import LayerTypeRecord

__all__ = ["quark_register_layer_types"]


@hookimpl
def quark_register_layer_types() -> Iterator[LayerTypeRecord]:
    """Yield the layer types of torch, and of transformers where it has a linear layer of its own."""
    yield _of_torch("linear", "Linear")
    yield LayerTypeRecord(
        name="conv1d",
        layer="transformers.pytorch_utils:Conv1D",
        quantized="quark.modules.layers:QuantConv1D",
        planned_as="linear",
        transposed=True,
        summary="the linear layer of GPT-2: x @ weight + bias",
    )
    yield _of_torch("conv2d", "Conv2d")
    yield _of_torch("conv_transpose2d", "ConvTranspose2d")
    yield _of_torch("embedding", "Embedding", lookup=True)
    yield _of_torch("embedding_bag", "EmbeddingBag", lookup=True)
    yield LayerTypeRecord(
        name="attention_output",
        layer="torch.nn.modules.linear:NonDynamicallyQuantizableLinear",
        summary="stays float: nn.MultiheadAttention reads its weight and never calls it",
    )


def _of_torch(name: str, layer: str, *, lookup: bool = False) -> LayerTypeRecord:
    quantized = f"quark.modules.layers:Quant{layer}"
    return LayerTypeRecord(name=name, layer=f"torch.nn:{layer}", quantized=quantized, lookup=lookup, summary=f"torch.nn.{layer}")
