"""Trial with ONNX's own evaluator: whether the nodes compute the same as the quantizer.

Nodes follow from the declared properties of a number format. A plugin's format may do more; a trial detects
it before any work.
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
"""Candidate shapes of the test tensor; the first that the granularity divides is used."""
_HALFWAY = 1e-2
"""Share of elements that may be one code off: QuantizeLinear divides by a static scale, and quantizers
multiply by its inverse.
"""


def reason_against(quantizer: TensorQuantizer, opset: int, *, activation: bool) -> str | None:
    """Return why ONNX cannot express a quantizer, as a predicate; None if it can.

    Args:
        quantizer: The quantizer.
        opset: Version of ONNX's operators.
        activation: Whether it quantizes an activation; else a parameter.
    """
    return _reason_against(quantizer, opset, activation)


@lru_cache(maxsize=256)
@torch.no_grad()
def _reason_against(quantizer: TensorQuantizer, opset: int, activation: bool) -> str | None:
    shape = next((s for s in _SHAPES if quantizer.shape_error(s) is None), None)
    if shape is None:
        return None  # no tensor has it; the run says why
    if any(level.format.table_shape is not None for level in quantizer.levels):
        return "learns a table for each weight, and no operator of ONNX takes values from one"
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
    """Return scales as calibration would find them."""
    observer = quantizer.observer()
    observer.observe(x)
    return quantizer.qparams_from(observer)


def _example(shape: tuple[int, ...]) -> Tensor:
    """Return rows of normal numbers of many scales and one row of zeros, always the same."""
    x = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        * 2.0 ** (torch.arange(shape[0]) % 13 - 6)[:, None]
    )
    x[0] = 0.0
    return x


def _evaluated(quantizer: TensorQuantizer, x: Tensor, qparams: QParams | None, opset: int, *, activation: bool) -> Tensor:
    """Return the result of the nodes for ``x``."""
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
"""Version of the file format that goes with opset 21."""
