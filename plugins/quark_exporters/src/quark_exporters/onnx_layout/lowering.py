"""Lowering replaces the ``FakeQuantize`` nodes of a traced model by ONNX nodes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from quark.base.names import folded
from quark.errors import UnsupportedError
from quark.numbers import QParams
from quark_exporters.onnx_layout.activations import quantized_activation
from quark_exporters.onnx_layout.ops import FLOAT, Library, Ops, as_tensor
from quark_exporters.onnx_layout.traced import DOMAIN, FAKE_QUANTIZE, TracedQuantizer
from quark_exporters.onnx_layout.weights import quantized_weight
from quark_exporters.stored_codes import short_block

__all__ = ["lower", "lowered"]


def lower(model: ir.Model, quantizers: Sequence[TracedQuantizer], opset: int, *, stores_codes: bool = True) -> None:
    """Replace every ``FakeQuantize`` node of a model, in place.

    If the input of the node is an initializer, the node is replaced by stored codes. If the input is an
    activation, the node is replaced by nodes that round the activation.

    Args:
        model: The traced model.
        quantizers: The quantizers of the model. The attribute ``index`` of a node is a position in this list.
        opset: Version of ONNX's standard operator set in the model.
        stores_codes: Whether the file stores weights as codes. Otherwise it stores rounded values.

    Raises:
        UnsupportedError: ONNX cannot express some quantizers. The message names them and says why.
    """
    library = Library(opset)
    reasons: dict[str, list[str]] = {}
    for node in list(model.graph.all_nodes()):
        if (node.domain, node.op_type) != (DOMAIN, FAKE_QUANTIZE):
            continue
        traced = quantizers[node.attributes["index"].as_int()]
        ops = Ops(library)
        try:
            output = _of_node(ops, traced, node, stores_codes=stores_codes)
        except UnsupportedError as error:
            reasons.setdefault(str(error), []).append(traced.name)
            continue
        _replace(model.graph, node, ops, output)
    if reasons:
        raise UnsupportedError("; ".join(f"{folded(names)} {reason}" for reason, names in reasons.items()))
    for name in [name for name, value in model.graph.initializers.items() if not value.uses() and not value.is_graph_output()]:
        del model.graph.initializers[name]
    model.functions.update(library.functions)
    model.graph.opset_imports.pop(DOMAIN, None)
    if library.functions:
        model.graph.opset_imports[DOMAIN] = 1


def lowered(ops: Ops, traced: TracedQuantizer, x: ir.Value, weight: Tensor | None, qparams: QParams | None, dtype: ir.DataType) -> ir.Value:
    """Add the nodes of a quantizer, and return their output in ``dtype``.

    Args:
        ops: Collects the nodes.
        traced: The quantizer.
        x: The input of the quantizer.
        weight: The constant value of ``x``, or None if ``x`` is an activation.
        qparams: The scales and zero points of the quantizer, or None if the model computes them at run time.
        dtype: The type of ``x``.
    """
    columns = weight.shape[-1] if weight is not None and weight.ndim else None if x.shape is None else x.shape[-1]
    if isinstance(columns, int) and (error := short_block(traced.quantizer, columns)) is not None:
        raise UnsupportedError(error)
    if weight is not None:
        if qparams is None:
            qparams = QParams(torch.ones((), dtype=torch.float32)) if traced.quantizer.is_float else traced.quantizer.find_qparams(weight)
        values = quantized_weight(ops, traced, weight, qparams)
    else:
        known = columns if isinstance(columns, int) else None
        values = quantized_activation(ops, traced.quantizer, x if dtype == FLOAT else ops.cast(x, FLOAT), qparams, known)
    if dtype == ir.DataType.FLOAT16:  # clamp, since a rounded value can exceed the range of float16
        limit = torch.finfo(torch.float16).max
        values = ops("Clip", values, ops.constant(-limit), ops.constant(limit))
    return values if dtype == FLOAT else ops.cast(values, dtype)


def _of_node(ops: Ops, traced: TracedQuantizer, node: ir.Node, *, stores_codes: bool) -> ir.Value:
    x, *scales = node.inputs
    assert x is not None
    found = [None if value is None else _constant(value) for value in scales]
    qparams = None if not found or found[0] is None else QParams(found[0], *found[1:])
    weight = _constant(x) if x.is_initializer() else None
    dtype = node.outputs[0].dtype
    assert dtype is not None
    if weight is not None and not stores_codes:
        if traced.is_rounded:
            return x
        return ops.initializer(f"{traced.name}.rounded", as_tensor(traced.quantizer.fake_quantize(weight, qparams), dtype))
    return lowered(ops, traced, x, weight, qparams, dtype)


def _constant(value: ir.Value) -> Tensor:
    """Return the tensor of an initializer.

    If the initializer refers to a tensor of the model, the tensor is not copied.
    """
    stored = value.const_value
    if stored is None:
        raise UnsupportedError("has scales that the model computes at run time, which ONNX cannot express here")
    tensor = getattr(stored, "raw", None)
    return tensor.detach() if isinstance(tensor, Tensor) else torch.from_numpy(stored.numpy().copy())


def _replace(graph: ir.Graph, node: ir.Node, ops: Ops, output: ir.Value) -> None:
    """Replace ``node`` by the nodes in ``ops``. The node may be in a subgraph of ``graph``."""
    old, place = node.outputs[0], node.graph
    assert place is not None
    for value in ops.initializers:
        value.name = _unused(graph, value.name or "codes")
        graph.register_initializer(value)
    place.insert_before(node, ops.nodes)
    if not output.is_initializer():
        output.shape, output.type = old.shape, old.type
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    place.remove(node, safe=True)


def _unused(graph: ir.Graph, name: str) -> str:
    """Return a name that no initializer has: ``name``, or ``name`` with a number.

    If a quantizer runs several times, all its initializers have the same preferred name.
    """
    number, free = 1, name
    while free in graph.initializers:
        number, free = number + 1, f"{name}.{number}"
    return free
