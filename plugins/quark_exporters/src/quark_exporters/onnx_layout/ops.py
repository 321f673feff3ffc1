"""Helpers that build ONNX graphs.

They build the nodes of a graph, and the ONNX functions that quark defines in the domain ``quark``.

These functions consist only of ONNX's own operators, so every runtime can run them.
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
"""Maps each dtype that a model can compute in to the ONNX type of the same format."""


class Library:
    """The ONNX functions that are defined in an exported file.

    Args:
        opset: Version of ONNX's standard operator set that the functions use.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.functions: dict[ir.OperatorIdentifier, ir.Function] = {}

    def define(self, name: str, inputs: Iterable[str], body: Callable[..., ir.Value], doc: str) -> str:
        """Define a function, unless the library already has the same function, and return the name.

        If another function already has the name ``name``, a number is appended.

        Args:
            name: The preferred name.
            inputs: Names of the inputs of the function.
            body: Callable that builds the function. Its arguments are an `Ops` and the inputs; it returns the
                output.
            doc: Description of the function. Two functions with the same name and the same description count
                as the same function.
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
    """Collects the nodes of a graph or of a function.

    ``ops("Add", a, b)`` adds an ``Add`` node and returns the output of the node.

    Args:
        library: The library of the functions that the nodes call. `function` defines new functions in this
            library.
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
        """Add a ``Constant`` node and return its output.

        A tensor keeps its dtype. An integer or a list becomes int64, and a float becomes float32.
        """
        if not isinstance(value, Tensor):
            is_whole = isinstance(value, int | list)
            value = torch.tensor(value, dtype=torch.int64 if is_whole else torch.float32)
        return self("Constant", value=as_tensor(value))

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Add an initializer with the name ``name`` and the content ``tensor``, and return the ONNX value."""
        value = ir.val(name, dtype=tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
        self.initializers.append(value)
        return value

    def function(self, name: str, body: Callable[..., ir.Value], doc: str, **inputs: ir.Value) -> ir.Value:
        """Define a function with `Library.define`, and return its output for ``inputs``.

        The output comes from a new node that calls the function.
        """
        return self(self.library.define(name, inputs, body, doc), *inputs.values(), domain=DOMAIN)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Add a node that casts ``x`` to ``dtype``, and return its output."""
        return self("Cast", x, to=dtype.value)


def block_shape(ops: Ops, x: ir.Value, size: int) -> ir.Value:
    """Return the shape ``[…, n, size]`` that splits the last axis of ``x`` into blocks.

    There are n blocks of ``size`` elements.
    """
    leading = ops("Slice", ops("Shape", x), ops.constant([0]), ops.constant([-1]))
    return ops("Concat", leading, ops.constant([-1, size]), axis=0)


def as_tensor(values: Tensor, dtype: ir.DataType | None = None) -> ir.Tensor[Any]:
    """Return ``values`` as an ONNX tensor of type ``dtype``.

    Args:
        values: A tensor on any device. Even if ``dtype`` has fewer than 8 bits, each element has one integer.
        dtype: The ONNX type of the result. None keeps the type of ``values``.
    """
    values = values.detach().cpu().contiguous()
    if dtype is None:
        return ir.Tensor(values.numpy())
    if values.dtype.is_floating_point and values.dtype.itemsize < torch.float32.itemsize:
        bits = values.view(torch.int16 if values.dtype.itemsize == torch.int16.itemsize else torch.uint8).numpy()
        return ir.Tensor(bits.view(dtype.numpy()), dtype=dtype)
    return ir.Tensor(np.asarray(values.numpy()).astype(dtype.numpy()), dtype=dtype)
