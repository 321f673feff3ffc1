"""Traces a quantized model to a graph in which each quantizer is one ``FakeQuantize`` node.

The attribute ``index`` of a node says which quantizer the node stands for.
`quark_exporters.onnx_layout.lowering` replaces the nodes after tracing, because the values of constants are
known only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.models.layers import QuantizedLayer, QuantizerModule, RoundedParameter
from quark.numbers import TensorQuantizer

__all__ = ["DOMAIN", "FAKE_QUANTIZE", "TracedQuantizer", "traced_form", "traced_quantizers"]

DOMAIN = "quark"
"""ONNX domain of the ``FakeQuantize`` nodes of a traced model, and of the functions in the exported file."""

FAKE_QUANTIZE = "FakeQuantize"
"""Type of the nodes.

Their inputs are the tensor, the scale, the zero point and the outer scale (see `quark.numbers.QParams`).
"""


@attrs.frozen(eq=False)
class TracedQuantizer:
    """The quantizer that a ``FakeQuantize`` node stands for.

    Attributes:
        name: Full name of the quantizer module in the model, for messages.
        quantizer: The quantizer.
        is_rounded: Whether the values of the tensor are already rounded, as in the weights of quantized
            layers.
    """

    name: str
    quantizer: TensorQuantizer
    is_rounded: bool = False


def traced_quantizers(model: nn.Module) -> list[TracedQuantizer]:
    """Return the quantizers of a model, in the order of its modules."""
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    of_parameters = {id(q) for layer in layers for q in (layer.weight_quantizer, layer.bias_quantizer)}
    return [
        TracedQuantizer(name, module.quantizer, is_rounded=id(module) in of_parameters or isinstance(module, RoundedParameter))
        for name, module in model.named_modules()
        if isinstance(module, QuantizerModule)
    ]


@contextmanager
def traced_form(model: nn.Module) -> Iterator[list[TracedQuantizer]]:
    """Prepare a model for tracing during the ``with`` block, and yield a list of the model's quantizers.

    If the model is traced inside the ``with`` block, the graph has one ``FakeQuantize`` node for each
    quantizer.

    The attribute ``index`` of the node is the position of the quantizer in the list.
    """
    modules = [module for module in model.modules() if isinstance(module, QuantizerModule)]
    for index, module in enumerate(modules):
        module.forward = partial(_node, module, index)  # type: ignore[method-assign]
    classes = [(layer, type(layer)) for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    for layer, layer_class in classes:
        layer.__class__ = _with_quantized_parameters(layer_class)  # type: ignore[arg-type]  # classes are hashed by identity
    try:
        yield traced_quantizers(model)
    finally:
        for module in modules:
            del module.forward
        for layer, layer_class in classes:
            layer.__class__ = layer_class


def _node(module: QuantizerModule, index: int, x: Tensor) -> Tensor:
    """Add a ``FakeQuantize`` node to the trace, and return its output.

    The output has the dtype and shape of ``x``.
    """
    scales = (module.scale, module.zero_point, module.outer_scale)
    output: Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{FAKE_QUANTIZE}", (x, *scales), {"index": index}, dtype=x.dtype, shape=x.shape, version=1
    )
    return output


# A layer reads its parameters as attributes, for example ``self.weight``. Python looks for a property of the
# class before it asks the module for a parameter, so a property can replace a parameter.
@cache
def _with_quantized_parameters(layer_class: type[QuantizedLayer]) -> type[QuantizedLayer]:
    """Return a subclass of ``layer_class`` that quantizes ``weight`` and ``bias`` whenever they are read."""

    def reader(name: str) -> property:
        def read(layer: Any) -> Any:
            parameter, quantizer = layer._parameters[name], getattr(layer, f"{name}_quantizer")
            return parameter if parameter is None or quantizer is None else quantizer(parameter)

        return property(read)

    return type(layer_class.__name__, (layer_class,), {"weight": reader("weight"), "bias": reader("bias")})
