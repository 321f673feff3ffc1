"""Fake quantization of an activation in ONNX, with QuantizeLinear and DequantizeLinear or with a function.

A function is used if these operators round differently from the format.

All arithmetic is in float32, in the quantizer's order. Dynamic scales are outputs of functions of the domain
``quark``, whose names describe the spec.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from quark.config.layer import levels
from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.numbers import NumberFormat, PerChannel, PerGroup, PerTensor, PerToken, QParams, TensorQuantizer
from quark.numbers.single_level import SingleLevelQuantizer
from quark.numbers.two_level import TwoLevelQuantizer
from quark_exporters.onnx_layout.codes import INTEGERS, native_type, whole_ends
from quark_exporters.onnx_layout.ops import FLOAT, FLOAT_TYPES, Ops, as_tensor, block_shape
from quark_exporters.onnx_layout.steps import Steps, steps_of

__all__ = ["described", "name_of", "quantized_activation"]


def quantized_activation(ops: Ops, quantizer: TensorQuantizer, x: ir.Value, qparams: QParams | None, columns: int | None) -> ir.Value:
    """Add the nodes that fake-quantize ``x``, float32, and return their output.

    Args:
        ops: Takes the nodes.
        quantizer: The quantizer.
        x: The activation.
        qparams: Its scales; None if they are found at run time.
        columns: Length of the last axis; None if it varies.

    Raises:
        UnsupportedError: ONNX cannot express it. The message is a reason without its subject.
    """
    if quantizer.is_float:
        return ops.cast(ops.cast(x, FLOAT_TYPES[quantizer.stored_level.format.storage_dtype]), FLOAT)
    if isinstance(quantizer, SingleLevelQuantizer):
        if qparams is not None and not quantizer.is_dynamic:
            return _static(ops, quantizer, x, qparams)
        return _dynamic(ops, quantizer, x, columns)
    if isinstance(quantizer, TwoLevelQuantizer) and qparams is not None and quantizer.element_level.is_dynamic:
        return _two_level(ops, quantizer, x, qparams.scale)
    raise UnsupportedError("has dynamic scales of several levels, which ONNX cannot express")


def _static(ops: Ops, quantizer: SingleLevelQuantizer, x: ir.Value, qparams: QParams) -> ir.Value:
    granularity, number_format, zero = quantizer.granularity, quantizer.format, qparams.zero_point
    if not isinstance(granularity, PerTensor | PerChannel):
        raise UnsupportedError("has static scales that are neither per tensor nor per channel")
    kind = native_type(number_format)
    if kind is not None and not (zero is not None and zero.is_floating_point()):
        where = {"axis": granularity.axis} if isinstance(granularity, PerChannel) else {}
        # Written even if all are 0: without them, onnxruntime's fusions treat codes as unsigned.
        zeros = torch.zeros_like(qparams.scale) if zero is None else zero
        zero_point = ops("Constant", value=as_tensor(zeros, kind)) if zero is not None or kind in INTEGERS else None
        return _native(ops, kind, x, ops.constant(qparams.scale.float()), zero_point, where)
    if zero is not None or not isinstance(granularity, PerTensor):
        raise UnsupportedError("has zero points or scales per channel in a format that QuantizeLinear lacks")

    def body(f: Ops, x: ir.Value, scale: ir.Value) -> ir.Value:
        return _rounded(f, quantizer, x, scale)

    scale = ops.constant(qparams.scale.float())
    return ops.function(f"FakeQuantize_{name_of(quantizer)}", body, described(quantizer), x=x, scale=scale)


def _native(ops: Ops, kind: ir.DataType, x: ir.Value, scale: ir.Value, zero: ir.Value | None, where: dict[str, Any]) -> ir.Value:
    inputs = (scale,) if zero is None else (scale, zero)
    own: dict[str, Any] = {} if zero is not None else {"output_dtype": kind.value}
    return ops("DequantizeLinear", ops("QuantizeLinear", x, *inputs, **where, **own), *inputs, **where)


def _dynamic(ops: Ops, quantizer: SingleLevelQuantizer, x: ir.Value, columns: int | None) -> ir.Value:
    """Round with scales of the range of a block, a token or the tensor."""
    kind = native_type(quantizer.format) if _divides_as_onnx(quantizer) else None
    name, size = name_of(quantizer), _block_size(quantizer)
    if kind is None or (columns is None and size is not None):

        def body(f: Ops, x: ir.Value) -> ir.Value:
            blocks = x if size in (None, -1) else f("Reshape", x, block_shape(f, x, size))
            y = _rounded(f, quantizer, blocks, _scale(f, quantizer, blocks))
            return f("Reshape", y, f("Shape", x))

        return ops.function(f"FakeQuantize_{name}", body, described(quantizer), x=x)

    def scales(f: Ops, x: ir.Value) -> ir.Value:
        if size in (None, -1):
            return _scale(f, quantizer, x)
        return f("Squeeze", _scale(f, quantizer, f("Reshape", x, block_shape(f, x, size))), f.constant([-1]))

    scale = ops.function(f"Scale_{name}", scales, described(quantizer), x=x)
    where: dict[str, Any] = {} if size is None else {"axis": -1, "block_size": columns if size == -1 else size}
    return _native(ops, kind, x, scale, None, where)


def _two_level(ops: Ops, quantizer: TwoLevelQuantizer, x: ir.Value, outer: Tensor) -> ir.Value:
    """Round with scales of blocks in a small format, relative to a calibrated scale of the tensor."""
    elements, scales = quantizer.element_level, quantizer.scale_level
    size = _block_size(elements)
    if size is None or outer.ndim:
        raise UnsupportedError("has two-level scales that are not group scales under one scale of the tensor")
    largest = elements.format.max_magnitude(elements.spec)
    relative = steps_of(lambda t: quantizer.scales_from_ranges(-t, t, torch.tensor(1 / largest, dtype=torch.float32)).scale, signed=False)
    if relative is None:
        raise UnsupportedError(f"has scales in {scales.format.name}, which has too many values for a table")

    def body(f: Ops, x: ir.Value, outer: ir.Value) -> ir.Value:
        blocks = x if size == -1 else f("Reshape", x, block_shape(f, x, size))
        magnitude = f("ReduceMax", f("Abs", blocks), f.constant([-1]), keepdims=1)
        ideal = f("Div", f("Div", magnitude, f.constant(largest)), outer)
        scale = f("Mul", _looked_up(f, relative, ideal), outer)
        return f("Reshape", _rounded(f, elements, blocks, scale), f("Shape", x))

    outer_scale = ops.constant(outer.float())
    return ops.function(f"FakeQuantize_{name_of(quantizer)}", body, described(quantizer), x=x, outer_scale=outer_scale)


def _divides_as_onnx(quantizer: SingleLevelQuantizer) -> bool:
    """Return whether QuantizeLinear's ``x / scale`` equals the quantizer's quotient to the bit.

    It matters because the largest value of an integer block lies halfway between two codes, so the last bit
    decides.
    """
    if not quantizer.format.by_reciprocal(quantizer.spec):
        return True
    steps = _scale_steps(quantizer.format, quantizer.spec, negative=False)
    mantissa_of_powers_of_two = 0.5  # by frexp
    return steps is not None and bool((torch.frexp(steps.values).mantissa == mantissa_of_powers_of_two).all())


def _block_size(quantizer: SingleLevelQuantizer) -> int | None:
    """Return how many neighbours share a scale: -1 for the whole last axis, None for the whole tensor."""
    granularity = quantizer.granularity
    if isinstance(granularity, PerGroup | PerToken):
        return granularity.size if isinstance(granularity, PerGroup) else -1
    if isinstance(granularity, PerTensor):
        return None
    raise UnsupportedError(f"has dynamic scales of {granularity}, which ONNX cannot express")


def _scale(ops: Ops, quantizer: SingleLevelQuantizer, blocks: ir.Value) -> ir.Value:
    """Return the scale of the range of each block: ``[…, 1]``, or of the tensor: ``[]``."""
    number_format, spec = quantizer.format, quantizer.spec
    if (
        spec.symmetric is False
        and number_format.qparams(torch.zeros(1, dtype=torch.float32), torch.ones(1, dtype=torch.float32), spec).zero_point is not None
    ):
        raise UnsupportedError("has dynamic zero points, which ONNX cannot express")
    of_low, of_high = (_scale_steps(number_format, spec, negative=negative) for negative in (True, False))
    axes = () if isinstance(quantizer.granularity, PerTensor) else (ops.constant([-1]),)
    keep: dict[str, Any] = {"keepdims": int(bool(axes))}
    if of_low is not None and of_high is not None and not of_low.equals(of_high):
        low = ops("Relu", ops("Neg", ops("ReduceMin", blocks, *axes, **keep)))
        high = ops("Relu", ops("ReduceMax", blocks, *axes, **keep))
        return ops("Max", _looked_up(ops, of_low, low), _looked_up(ops, of_high, high))
    largest = ops("ReduceMax", ops("Abs", blocks), *axes, **keep)
    if of_high is not None:
        return _looked_up(ops, of_high, largest)
    # Assume a scale proportional to the range, with a minimum; the trial checks this
    # (`quark_exporters.onnx_layout.trial`).
    low, high = torch.tensor([[0.0, -1e-45], [0.0, 1e-45]], dtype=torch.float32)
    of_zeros, smallest = number_format.qparams(low, high, spec).scale.float().tolist()
    scale = ops("Max", ops("Div", largest, ops.constant(number_format.max_magnitude(spec))), ops.constant(smallest))
    return scale if of_zeros == smallest else ops("Where", ops("Equal", largest, ops.constant(0.0)), ops.constant(of_zeros), scale)


def _rounded(ops: Ops, quantizer: SingleLevelQuantizer, x: ir.Value, scale: ir.Value) -> ir.Value:
    """Return ``x`` in units of ``scale``, rounded, and back."""
    by_reciprocal = quantizer.format.by_reciprocal(quantizer.spec)
    t = ops("Mul", x, ops("Reciprocal", scale)) if by_reciprocal else ops("Div", x, scale)
    return ops("Mul", _round(ops, quantizer.format, t), scale)


def _round(ops: Ops, number_format: NumberFormat, t: ir.Value) -> ir.Value:
    """Return scaled values rounded to a format."""
    finer = _subscales(number_format)
    if finer is not None:
        pairs = ops("Reshape", t, block_shape(ops, t, _PAIR))
        factor = _looked_up(ops, finer, ops("ReduceMax", ops("Abs", pairs), ops.constant([-1]), keepdims=1))
        rounded = ops("Mul", _round(ops, number_format.element_format(), ops("Div", pairs, factor)), factor)
        return ops("Reshape", rounded, ops("Shape", t))
    ends = whole_ends(number_format)
    if ends is not None:
        return ops("Clip", ops("Round", t), *(ops.constant(float(end)) for end in ends))
    steps = _round_steps(number_format)
    if steps is None:
        raise UnsupportedError(f"is in {number_format.name}, which has too many values for a table")
    return _looked_up(ops, steps, t)


_PAIR = 2
"""Neighbours that share bits, in formats with subscales; another number fails the trial."""


@lru_cache(maxsize=64)
def _round_steps(number_format: NumberFormat) -> Steps | None:
    return steps_of(lambda t: number_format.round_(t.clone()), signed=True)


@lru_cache(maxsize=64)
def _subscales(number_format: NumberFormat) -> Steps | None:
    """Return the factor of a pair by its largest magnitude; None if formats have none."""
    if number_format.subscales(torch.ones(1, 32, dtype=torch.float32)) is None:
        return None

    def factors(t: Tensor) -> Tensor:
        of_both = number_format.subscales(t.repeat_interleave(_PAIR).contiguous())
        assert of_both is not None
        return of_both[::_PAIR]

    return steps_of(factors, signed=False)


def _scale_steps(number_format: NumberFormat, spec: QTensorConfig, *, negative: bool) -> Steps | None:
    """Return the scale for one end of a range whose other end is 0."""
    zero = torch.zeros(1, dtype=torch.float32)

    def scale(end: Tensor) -> Tensor:
        zeros = zero.expand_as(end)
        ends = (-end, zeros) if negative else (zeros, end)
        return number_format.qparams(*ends, spec).scale.float()

    return steps_of(scale, signed=False)


def _looked_up(ops: Ops, steps: Steps, x: ir.Value) -> ir.Value:
    """Return the values of a step function: a call of ``LookUpN`` for tables of ``2^N`` values."""
    bits = max(1, (len(steps.values) - 1).bit_length())

    def binary_search(f: Ops, x: ir.Value, thresholds: ir.Value, values: ir.Value) -> ir.Value:
        place = f.constant(0)
        for bit in reversed(range(bits)):
            further = f("Add", place, f.constant(1 << bit))
            place = f("Where", f("GreaterOrEqual", x, f("Gather", thresholds, further)), further, place)
        return f("Where", f("IsNaN", x), x, f("Gather", values, place))

    missing = (1 << bits) - len(steps.values)
    # Pad with −inf before the thresholds and +inf after them, so that no finite number selects a padding
    # entry.
    thresholds = torch.cat(
        [torch.full((1,), -torch.inf, dtype=torch.float32), steps.thresholds, torch.full((missing,), torch.inf, dtype=torch.float32)]
    )
    values = torch.cat([steps.values, steps.values[-1:].expand(missing)])
    tables = {"thresholds": ops.constant(thresholds), "values": ops.constant(values)}
    return ops.function(f"LookUp{bits}", binary_search, _LOOK_UP.format(1 << bits), x=x, **tables)


_LOOK_UP = "values[i] of the last i with thresholds[i] <= x; NaN stays NaN. Both tables have {} entries, thresholds ascend."


def name_of(quantizer: TensorQuantizer) -> str:
    """Return a name for the spec of a quantizer, such as ``fp4_per_group32_e8m0``.

    `described` distinguishes specs with equal names.
    """
    name = "_then_".join(_name(level) for level in levels(quantizer.spec))
    return re.sub(r"\W", "_", name)


def described(quantizer: TensorQuantizer) -> str:
    """Return the spec of a quantizer as JSON, and which elements share a scale."""
    return f"{json.dumps([level.to_dict() for level in levels(quantizer.spec)])}, {quantizer.granularity}"


def _name(spec: QTensorConfig) -> str:
    """Return the fields on which the arithmetic of an activation depends.

    Fields with their usual value are left out.
    """
    size = spec.group_size or ""
    parts = [spec.dtype.name, "" if spec.qscheme is None else f"{spec.qscheme.value}{size}"]
    parts += ["" if spec.scale_format in (None, "float32") else str(spec.scale_format), spec.scale_calculation_mode or ""]
    parts += ["" if spec.scale_type is None or spec.scale_type.value.startswith("float") else spec.scale_type.value]
    parts += ["" if spec.round_method is None or spec.round_method.name == "half_even" else spec.round_method.name]
    return "_".join(filter(None, parts))
