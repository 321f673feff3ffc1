"""A check that the exported nodes and the quantizer compute the same.

The check runs the nodes in ONNX's reference evaluator.

The exporter chooses nodes from the properties that a number format declares. A number format of a plugin may
not round as it declares. This check finds such a format before the model is quantized.
"""

from __future__ import annotations

from functools import lru_cache

import onnx_ir as ir
import torch
from torch import Tensor

from quark.errors import UnsupportedError
from quark.numbers import QParams, TensorQuantizer
from quark_exporters.onnx_layout.lowering import lowered
from quark_exporters.onnx_layout.ops import FLOAT, Library, Ops
from quark_exporters.onnx_layout.traced import TracedQuantizer

__all__ = ["reason_against"]

_SHAPES = ((16, 64), (16, 128), (64, 64), (128, 128), (16, 256), (256, 256), (16, 1024))
"""Candidate shapes of the test tensor. The trial uses the first shape that the granularity can divide."""
_HALFWAY = 1e-2
"""The fraction of elements that may differ by one code.

QuantizeLinear divides by a static scale, but quantizers multiply by the reciprocal of the scale, so a value
halfway between two codes can be rounded differently.
"""


def reason_against(quantizer: TensorQuantizer, opset: int, *, activation: bool) -> str | None:
    """Return why ONNX cannot express a quantizer, as a predicate without a subject, such as "has …".

    Return None if ONNX can express it.

    Args:
        quantizer: The quantizer.
        opset: Version of ONNX's standard operator set.
        activation: Whether the quantizer quantizes an activation. Otherwise it quantizes a parameter.
    """
    return _reason_against(quantizer, opset, activation)


@lru_cache(maxsize=256)
@torch.no_grad()
def _reason_against(quantizer: TensorQuantizer, opset: int, activation: bool) -> str | None:
    shape = next((s for s in _SHAPES if quantizer.shape_error(s) is None), None)
    if shape is None:
        return None  # no test tensor has a suitable shape; an export still reports what it cannot express
    if any(level.format.table_shape is not None for level in quantizer.levels):
        return "learns a table of values for each weight, and no ONNX operator can look up values in such a table"
    x = _example(shape)
    qparams = None
    if not quantizer.is_float and not (activation and quantizer.is_dynamic):
        qparams = _static(quantizer, x) if activation else quantizer.find_qparams(x)
    expected = quantizer.fake_quantize(x, qparams)
    try:
        found = _evaluated(quantizer, x, qparams, opset, activation=activation)
    except UnsupportedError as error:
        return str(error)
    differ = ~((found == expected) | (found.isnan() & expected.isnan()))
    if not bool(differ.any()):
        return None
    is_halfway = False
    if activation and qparams is not None:
        one_code = (found - expected).abs() <= qparams.scale.float() * 1.001
        is_halfway = float(differ.float().mean()) < _HALFWAY and bool(one_code[differ].all())
    return None if is_halfway else "rounds differently from the ONNX operators of its number format and observer"


def _static(quantizer: TensorQuantizer, x: Tensor) -> QParams:
    """Return the scales and zero points that calibration on ``x`` gives."""
    observer = quantizer.observer()
    observer.observe(x)
    return quantizer.qparams_from(observer)


def _example(shape: tuple[int, ...]) -> Tensor:
    """Return a test tensor that is always the same.

    It has one row of zeros. The other rows are normally distributed, and differ in magnitude.
    """
    x = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        * 2.0 ** (torch.arange(shape[0]) % 13 - 6)[:, None]
    )
    x[0] = 0.0
    return x


def _evaluated(quantizer: TensorQuantizer, x: Tensor, qparams: QParams | None, opset: int, *, activation: bool) -> Tensor:
    """Run the exported nodes on ``x`` in ONNX's reference evaluator, and return their output."""
    from onnx.reference import ReferenceEvaluator

    ops = Ops(Library(opset))
    source = ir.val("x", dtype=FLOAT, shape=x.shape)
    weight = None if activation else quantizer.fake_quantize(x, qparams)
    traced = TracedQuantizer("x", quantizer, is_rounded=True)
    output = lowered(ops, traced, source, weight, qparams, FLOAT)
    output.name, output.dtype, output.shape = "y", FLOAT, ir.Shape(x.shape)
    inputs = [source] if activation else []
    graph = ir.Graph(inputs, [output], nodes=ops.nodes, initializers=ops.initializers, name="trial", opset_imports={"": opset, "quark": 1})
    model = ir.Model(graph, ir_version=_IR, functions=list(ops.library.functions.values()))
    (y,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x.numpy()} if activation else {})
    return torch.from_numpy(y)


_IR = 10
"""The version of ONNX's file format (IR version) that was released with opset 21."""
