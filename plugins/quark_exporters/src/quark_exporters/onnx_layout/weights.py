"""Writes a quantized weight as an initializer that stores codes, and a node that dequantizes the codes.

The node is DequantizeLinear, or a call of a function of the domain ``quark``.

The dequantized values are exactly those of the quantized model. quark computes the codes while it writes the
file, one tensor at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from quark.errors import ConfigError, UnsupportedError
from quark.numbers import PerChannel, PerGroup, PerGroupOfRows, PerTensor, PerToken, QParams, TensorQuantizer
from quark.numbers.on_grid import LOSSY, codes_error
from quark.numbers.progressive import ProgressiveQuantizer
from quark.numbers.single_level import SingleLevelQuantizer
from quark.numbers.tensor_views import KernelMatrix, ViewedQuantizer
from quark.numbers.two_level import TwoLevelQuantizer
from quark_exporters.onnx_layout.codes import StoredCodes, stored_codes, stored_type
from quark_exporters.onnx_layout.ops import FLOAT, FLOAT_TYPES, Ops, as_tensor
from quark_exporters.onnx_layout.traced import TracedQuantizer

__all__ = ["quantized_weight"]


def quantized_weight(ops: Ops, traced: TracedQuantizer, weight: Tensor, qparams: QParams) -> ir.Value:
    """Add the nodes that dequantize a weight to float32, and return their output.

    Args:
        ops: Collects the nodes and the initializers.
        traced: The quantizer of the weight.
        weight: The weight. ``traced.is_rounded`` says whether the values of the weight are already rounded.
            quark reads the values when it writes the file.
        qparams: The scales and zero points of the weight.

    Raises:
        UnsupportedError: ONNX cannot express the quantizer. The message is a predicate, to which the caller
            adds the subject.
    """
    quantizer = traced.quantizer
    level = quantizer.stored_level
    if quantizer.is_float:
        kind = FLOAT_TYPES[level.format.storage_dtype]
        cast = ir.LazyTensor(lambda: as_tensor(weight.to(level.format.storage_dtype), kind), dtype=kind, shape=ir.Shape(weight.shape))
        return ops.cast(ops.initializer(f"{traced.name}.codes", cast), FLOAT)
    inner = quantizer.inner if isinstance(quantizer, ViewedQuantizer) else quantizer
    if not isinstance(inner, SingleLevelQuantizer | TwoLevelQuantizer | ProgressiveQuantizer):
        raise UnsupportedError(f"has the quantizer {type(quantizer).__name__}, which a plugin defines and ONNX cannot express")
    codes = stored_codes(level.format)
    if codes is None:
        raise UnsupportedError(f"is in {level.format.name}, a format whose codes fit no ONNX type")
    scale, where = _of_axis(quantizer, qparams.scale.float(), tuple(weight.shape))
    if codes.type.is_floating_point() and len(weight.shape) > 1 and where.get("axis", 0) == 0:
        scale, where = _in_blocks(scale, tuple(weight.shape))
    zero = None if qparams.zero_point is None else _of_axis(quantizer, qparams.zero_point, tuple(weight.shape))[0]
    outer = None if qparams.outer_scale is None else ops.constant(qparams.outer_scale.float())
    make: Any = partial(_stored, traced, weight, qparams, codes)
    stored = ops.initializer(f"{traced.name}.codes", ir.LazyTensor(make, dtype=codes.type, shape=ir.Shape(weight.shape)))
    scales = _scales(ops, traced.name, scale * codes.step)
    if outer is not None and isinstance(quantizer, TwoLevelQuantizer):
        scales = ops("Mul", scales, outer)
    if codes.table is not None or (zero is not None and zero.is_floating_point()):
        values = _by_function(ops, stored, scales, zero, codes.table, where)
    else:
        if zero is None and codes.type == ir.DataType.INT8:
            # On some CPUs, products of unsigned and signed bytes saturate. There, the option
            # session.x64quantprecision lets onnxruntime make the codes unsigned, and onnxruntime then reads a
            # zero point for each scale.
            zero = torch.zeros_like(scale, dtype=torch.int8)
        zeros = () if zero is None else (ops.initializer(f"{traced.name}.zero_points", as_tensor(zero, codes.type)),)
        values = ops("DequantizeLinear", stored, scales, *zeros, **where)
    return ops("Mul", values, outer) if outer is not None and isinstance(quantizer, ProgressiveQuantizer) else values


def _of_axis(quantizer: TensorQuantizer, scale: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, dict[str, Any]]:
    """Return ``scale`` in the shape that DequantizeLinear needs, and the attributes of the node.

    Instead of scales, ``scale`` may have zero points. ``shape`` is the shape of the weight.
    """
    granularity = quantizer.granularity
    if isinstance(granularity, PerTensor):
        return scale, {}
    if isinstance(granularity, PerChannel):
        return scale, {"axis": _channel_axis(quantizer, granularity.axis) % len(shape)}
    if isinstance(granularity, PerGroupOfRows):
        return scale.t().contiguous(), {"axis": 0, "block_size": granularity.size}
    if isinstance(quantizer, ViewedQuantizer):
        raise UnsupportedError(
            f"has scales with the granularity {granularity} along the channels of a convolution, which ONNX cannot express"
        )
    if isinstance(granularity, PerGroup | PerToken):
        scale = scale.reshape(*shape[:-1], -1)
    elif len(shape) == 2:
        scale = granularity.expand_scale(scale, shape)
    else:
        raise UnsupportedError(f"has scales with the granularity {granularity}, which ONNX cannot express")
    return scale.contiguous(), {"axis": len(shape) - 1, "block_size": shape[-1] // scale.shape[-1]}


def _channel_axis(quantizer: TensorQuantizer, axis: int) -> int:
    """Return the axis of the stored weight for the axis ``axis`` of the quantizer.

    The quantizer may round another view of the weight, with other axes.
    """
    view = quantizer.view if isinstance(quantizer, ViewedQuantizer) else None
    if not (isinstance(view, KernelMatrix) and view.is_transposed):
        return axis
    if view.groups > 1:
        raise UnsupportedError("has scales per channel of a transposed convolution with groups, which ONNX cannot express")
    return 1 - axis


def _scales(ops: Ops, name: str, scale: Tensor) -> ir.Value:
    """Add an initializer with the scales, and return the scales as a float32 value.

    The initializer has the narrowest type that represents the scales exactly.
    """
    kind, dtype = stored_type(scale, ops.library.opset) if scale.ndim > 1 else (FLOAT, torch.float32)
    value = ops.initializer(f"{name}.scales", as_tensor(scale.to(dtype), kind))
    return value if kind == FLOAT else ops.cast(value, FLOAT)


def _by_function(
    ops: Ops, stored: ir.Value, scales: ir.Value, zero: Tensor | None, table: Tensor | None, where: dict[str, Any]
) -> ir.Value:
    if where.get("axis", 0) != 0 and "block_size" not in where:
        raise UnsupportedError(
            "has scales per channel of an axis other than the first, in a number format that DequantizeLinear cannot decode"
        )
    if table is not None:
        return ops.function("DequantizeTable", _dequantize_table, _TABLE, codes=stored, table=ops.constant(table), scale=scales)
    assert zero is not None
    zero_point = ops.constant(zero.float())
    return ops.function("DequantizeShifted", _dequantize_shifted, _SHIFTED, codes=stored, zero_point=zero_point, scale=scales)


_TABLE = "Returns table[codes] * scale. The last axis of codes consists of runs of equal length; scale has one element per run."
_SHIFTED = "Returns (codes - zero_point) * scale, with real zero points. The shapes are as in DequantizeTable."


def _dequantize_table(ops: Ops, codes: ir.Value, table: ir.Value, scale: ir.Value) -> ir.Value:
    places = ops.cast(codes, ir.DataType.INT32)
    blocks = ops("Reshape", ops("Gather", table, places), _runs(ops, scale))
    return ops("Reshape", ops("Mul", blocks, ops("Unsqueeze", scale, ops.constant([-1]))), ops("Shape", places))


def _dequantize_shifted(ops: Ops, codes: ir.Value, zero: ir.Value, scale: ir.Value) -> ir.Value:
    whole = ops.cast(codes, FLOAT)
    blocks = ops("Sub", ops("Reshape", whole, _runs(ops, scale)), ops("Unsqueeze", zero, ops.constant([-1])))
    return ops("Reshape", ops("Mul", blocks, ops("Unsqueeze", scale, ops.constant([-1]))), ops("Shape", whole))


def _in_blocks(scale: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, dict[str, Any]]:
    """Return the scales as one block scale per row, and the attributes of the DequantizeLinear node.

    ``scale`` has one scale for the whole tensor, or one scale for each index of the first axis. Block scales
    are needed because onnxruntime 1.31 treats a product of two dequantized matrices without block scales as
    an integer product, which it cannot compute with 8-bit floats.
    """
    per_row = scale.reshape(-1, *[1] * (len(shape) - 1)).expand(*shape[:-1], 1)
    return per_row.contiguous(), {"axis": len(shape) - 1, "block_size": shape[-1]}


def _runs(ops: Ops, scale: ir.Value) -> ir.Value:
    """Return a shape with the axes of ``scale``, and a last axis for the elements that share a scale."""
    return ops("Concat", ops("Shape", scale), ops.constant([-1]), axis=0)


@torch.no_grad()
def _stored(traced: TracedQuantizer, weight: Tensor, qparams: QParams, codes: StoredCodes) -> ir.Tensor[Any]:
    """Return the numbers that the file stores for a weight.

    Raises:
        ConfigError: The weight has a value that no code represents.
    """
    quantizer = traced.quantizer
    found = quantizer.codes_of(weight, qparams) if traced.is_rounded else quantizer.quantize(weight, qparams)
    complaint = codes_error(quantizer, qparams, weight, found, "order") if traced.is_rounded else None
    if complaint not in (None, LOSSY):
        raise ConfigError(
            f"'{traced.name}' cannot be stored as codes: it {complaint}. The tensor changed after quantization. Quantize the model again"
        )
    return as_tensor(codes.stored(found), codes.type)
