"""Nodes of a graph, and functions of the domain ``quark``.

Function bodies use ONNX's own operators, so any runtime supports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from quark_exporters.onnx_layout.traced import DOMAIN

__all__ = ["FLOAT", "FLOAT_TYPES", "Library", "Ops", "as_tensor", "block_shape"]

FLOAT = ir.DataType.FLOAT
FLOAT_TYPES = {torch.float32: FLOAT, torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}
"""Compute dtypes of models, with ONNX's types."""


class Library:
    """The functions of a file, by name.

    Args:
        opset: Version of ONNX's own operators.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.functions: dict[ir.OperatorIdentifier, ir.Function] = {}

    def define(self, name: str, inputs: Iterable[str], body: Callable[..., ir.Value], doc: str) -> str:
        """Add a function unless it exists, and return its name.

        The name gets a number if another function has it.

        Args:
            name: The preferred name.
            inputs: Names of the inputs.
            body: Gets an `Ops` and the inputs, and returns the output.
            doc: Its description. Functions with equal name and description are the same.
        """
        number, wanted = 1, name
        while (taken := self.functions.get((DOMAIN, name, ""))) is not None:
            if taken.doc_string == doc:
                return name
            number += 1
            name = f"{wanted}_{number}"
        arguments = [ir.val(argument) for argument in inputs]
        ops = Ops(self)
        output = body(ops, *arguments)
        output.name = "y"
        graph = ir.Graph(arguments, [output], nodes=ops.nodes, name=name, opset_imports={"": self.opset, DOMAIN: 1})
        function = ir.Function(DOMAIN, name, graph=graph, attributes=[])
        function.doc_string = doc
        self.functions[function.identifier()] = function
        return name


class Ops:
    """Collects the nodes of a graph or of a function: ``ops("Add", a, b)`` adds one and returns its output.

    Args:
        library: Receives the called functions.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []

    def __call__(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, domain=domain)
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, value: Tensor | float | int | list[int]) -> ir.Value:
        """Return a constant: float32, or int64 for integers."""
        if not isinstance(value, Tensor):
            is_whole = isinstance(value, int | list)
            value = torch.tensor(value, dtype=torch.int64 if is_whole else torch.float32)
        return self("Constant", value=as_tensor(value))

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Return an initializer of the graph."""
        value = ir.val(name, dtype=tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
        self.initializers.append(value)
        return value

    def function(self, name: str, body: Callable[..., ir.Value], doc: str, **inputs: ir.Value) -> ir.Value:
        """Return the output of a function of the library for inputs, defined as by `Library.define`."""
        return self(self.library.define(name, inputs, body, doc), *inputs.values(), domain=DOMAIN)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return ``x`` in that type."""
        return self("Cast", x, to=dtype.value)


def block_shape(ops: Ops, x: ir.Value, size: int) -> ir.Value:
    """Return the shape of ``x`` with its last axis split into blocks: ``[…, n, size]``."""
    leading = ops("Slice", ops("Shape", x), ops.constant([0]), ops.constant([-1]))
    return ops("Concat", leading, ops.constant([-1, size]), axis=0)


def as_tensor(values: Tensor, dtype: ir.DataType | None = None) -> ir.Tensor[Any]:
    """Return a tensor of ONNX; integers of less than a byte are given as bytes.

    Args:
        values: On any device.
        dtype: Its type; None keeps the type of ``values``.
    """
    values = values.detach().cpu().contiguous()
    if dtype is None:
        return ir.Tensor(values.numpy())
    if values.dtype.is_floating_point and values.dtype.itemsize < torch.float32.itemsize:
        bits = values.view(torch.int16 if values.dtype.itemsize == torch.int16.itemsize else torch.uint8).numpy()
        return ir.Tensor(bits.view(dtype.numpy()), dtype=dtype)
    return ir.Tensor(np.asarray(values.numpy()).astype(dtype.numpy()), dtype=dtype)
