"""The traced form of a quantized model: every quantizer becomes one ``FakeQuantize`` node.

The node names its quantizer.

`quark_exporters.onnx_layout.lowering` replaces the nodes after tracing, when constants are known.
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
"""Domain of the nodes ``FakeQuantize`` while a model is traced, and of the functions in the file."""

FAKE_QUANTIZE = "FakeQuantize"
"""Type of the nodes; inputs: the tensor, scale, zero point and outer scale, as in `quark.numbers.QParams`."""


@attrs.frozen(eq=False)
class TracedQuantizer:
    """The quantizer of a node.

    Attributes:
        name: Full name of the tensor, for messages.
        quantizer: The quantizer.
        is_rounded: Whether the tensor holds rounded values already, like weights of quantized layers.
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
    """Yield the quantizers of a model; while the body runs, each becomes a node of the forward.

    The node's attribute ``index`` counts them.
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
    """Return the output of the ``FakeQuantize`` node, a tensor like ``x``."""
    scales = (module.scale, module.zero_point, module.outer_scale)
    output: Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{FAKE_QUANTIZE}", (x, *scales), {"index": index}, dtype=x.dtype, shape=x.shape, version=1
    )
    return output


# Layers read their parameters as attributes, and Python finds a property of the class before a parameter of
# the module.
@cache
def _with_quantized_parameters(layer_class: type[QuantizedLayer]) -> type[QuantizedLayer]:
    """Return a subclass whose weight and bias are quantized when read."""

    def reader(name: str) -> property:
        def read(layer: Any) -> Any:
            parameter, quantizer = layer._parameters[name], getattr(layer, f"{name}_quantizer")
            return parameter if parameter is None or quantizer is None else quantizer(parameter)

        return property(read)

    return type(layer_class.__name__, (layer_class,), {"weight": reader("weight"), "bias": reader("bias")})
