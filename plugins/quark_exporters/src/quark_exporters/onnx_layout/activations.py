"""Adds the ONNX nodes that fake-quantize an activation.

The nodes are QuantizeLinear and DequantizeLinear. If these operators round differently from the number
format, a function of the domain ``quark`` replaces them.

The nodes compute in float32, with the same operations in the same order as the quantizer. If scales are
dynamic, a function of the domain ``quark`` computes them, and the name of the function describes the spec.
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
    """Add the nodes that fake-quantize ``x``, a float32 value, and return their output.

    Args:
        ops: Collects the nodes.
        quantizer: The quantizer of the activation.
        x: The activation.
        qparams: The static scales and zero points of the activation, or None if the model computes them at
            run time.
        columns: Length of the last axis of ``x``, or None if it varies.

    Raises:
        UnsupportedError: ONNX cannot express the quantizer. The message is a predicate, to which the caller
            adds the subject.
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
        # Zero points of integers are written even if all are 0. Without zero points, onnxruntime's fusions
        # treat the codes as unsigned.
        zeros = torch.zeros_like(qparams.scale) if zero is None else zero
        zero_point = ops("Constant", value=as_tensor(zeros, kind)) if zero is not None or kind in INTEGERS else None
        return _native(ops, kind, x, ops.constant(qparams.scale.float()), zero_point, where)
    if zero is not None or not isinstance(granularity, PerTensor):
        raise UnsupportedError("has zero points or scales per channel in a number format to which QuantizeLinear cannot round")

    def body(f: Ops, x: ir.Value, scale: ir.Value) -> ir.Value:
        return _rounded(f, quantizer, x, scale)

    scale = ops.constant(qparams.scale.float())
    return ops.function(f"FakeQuantize_{name_of(quantizer)}", body, described(quantizer), x=x, scale=scale)


def _native(ops: Ops, kind: ir.DataType, x: ir.Value, scale: ir.Value, zero: ir.Value | None, where: dict[str, Any]) -> ir.Value:
    inputs = (scale,) if zero is None else (scale, zero)
    own: dict[str, Any] = {} if zero is not None else {"output_dtype": kind.value}
    return ops("DequantizeLinear", ops("QuantizeLinear", x, *inputs, **where, **own), *inputs, **where)


def _dynamic(ops: Ops, quantizer: SingleLevelQuantizer, x: ir.Value, columns: int | None) -> ir.Value:
    """Add the nodes that compute dynamic scales for ``x`` and round ``x`` with them.

    A scale comes from the range of a block, of a token, or of the whole tensor.
    """
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
    """Add the nodes that round ``x`` with two-level scales.

    ``outer`` is the calibrated scale of the whole tensor. The model computes the scale of a block at run
    time, divides it by ``outer``, and rounds the quotient to a small format.
    """
    elements, scales = quantizer.element_level, quantizer.scale_level
    size = _block_size(elements)
    if size is None or outer.ndim:
        raise UnsupportedError("has two-level scales of another form than one scale per group and one scale for the whole tensor")
    largest = elements.format.max_magnitude(elements.spec)
    relative = steps_of(lambda t: quantizer.scales_from_ranges(-t, t, torch.tensor(1 / largest, dtype=torch.float32)).scale, signed=False)
    if relative is None:
        raise UnsupportedError(f"has scales in {scales.format.name}, a format with too many values for a lookup table")

    def body(f: Ops, x: ir.Value, outer: ir.Value) -> ir.Value:
        blocks = x if size == -1 else f("Reshape", x, block_shape(f, x, size))
        magnitude = f("ReduceMax", f("Abs", blocks), f.constant([-1]), keepdims=1)
        ideal = f("Div", f("Div", magnitude, f.constant(largest)), outer)
        scale = f("Mul", _looked_up(f, relative, ideal), outer)
        return f("Reshape", _rounded(f, elements, blocks, scale), f("Shape", x))

    outer_scale = ops.constant(outer.float())
    return ops.function(f"FakeQuantize_{name_of(quantizer)}", body, described(quantizer), x=x, outer_scale=outer_scale)


def _divides_as_onnx(quantizer: SingleLevelQuantizer) -> bool:
    """Return whether QuantizeLinear and the quantizer compute exactly the same quotient x / scale.

    The quotients must be equal up to the last bit. In a block with integer codes, the quotient for the
    largest value lies halfway between two codes, so the last bit decides to which code the value is rounded.
    """
    if not quantizer.format.by_reciprocal(quantizer.spec):
        return True
    steps = _scale_steps(quantizer.format, quantizer.spec, negative=False)
    mantissa_of_powers_of_two = 0.5  # as torch.frexp returns it
    return steps is not None and bool((torch.frexp(steps.values).mantissa == mantissa_of_powers_of_two).all())


def _block_size(quantizer: SingleLevelQuantizer) -> int | None:
    """Return how many neighbouring elements of the last axis share a scale.

    Return -1 if the whole axis shares one scale, and None if the whole tensor shares one scale.
    """
    granularity = quantizer.granularity
    if isinstance(granularity, PerGroup | PerToken):
        return granularity.size if isinstance(granularity, PerGroup) else -1
    if isinstance(granularity, PerTensor):
        return None
    raise UnsupportedError(f"has dynamic scales with the granularity {granularity}, which ONNX cannot express")


def _scale(ops: Ops, quantizer: SingleLevelQuantizer, blocks: ir.Value) -> ir.Value:
    """Add the nodes that compute scales from the ranges of blocks, and return the scales.

    The scales have the shape ``[…, 1]``, with one scale per block. If the granularity is per tensor, the
    shape is ``[]``.
    """
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
    # The code below assumes that the scale is proportional to the range and has a minimum. The trial
    # (`quark_exporters.onnx_layout.trial`) checks this assumption.
    low, high = torch.tensor([[0.0, -1e-45], [0.0, 1e-45]], dtype=torch.float32)
    of_zeros, smallest = number_format.qparams(low, high, spec).scale.float().tolist()
    scale = ops("Max", ops("Div", largest, ops.constant(number_format.max_magnitude(spec))), ops.constant(smallest))
    return scale if of_zeros == smallest else ops("Where", ops("Equal", largest, ops.constant(0.0)), ops.constant(of_zeros), scale)


def _rounded(ops: Ops, quantizer: SingleLevelQuantizer, x: ir.Value, scale: ir.Value) -> ir.Value:
    """Add the nodes that fake-quantize ``x`` with ``scale``, and return their output.

    They divide ``x`` by ``scale``, round the quotient, and multiply the result by ``scale``.
    """
    by_reciprocal = quantizer.format.by_reciprocal(quantizer.spec)
    t = ops("Mul", x, ops("Reciprocal", scale)) if by_reciprocal else ops("Div", x, scale)
    return ops("Mul", _round(ops, quantizer.format, t), scale)


def _round(ops: Ops, number_format: NumberFormat, t: ir.Value) -> ir.Value:
    """Add the nodes that round ``t``, the scaled values, to ``number_format``, and return their output."""
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
        raise UnsupportedError(f"is in {number_format.name}, a format with too many values for a lookup table")
    return _looked_up(ops, steps, t)


_PAIR = 2
"""The number of neighbouring elements that share a subscale. A format with another number fails the trial."""


@lru_cache(maxsize=64)
def _round_steps(number_format: NumberFormat) -> Steps | None:
    return steps_of(lambda t: number_format.round_(t.clone()), signed=True)


@lru_cache(maxsize=64)
def _subscales(number_format: NumberFormat) -> Steps | None:
    """Return the step function that computes the subscale of a pair of elements.

    The function maps the largest magnitude of the pair to the subscale.

    Return None if the format has no subscales, or if the function has too many steps.
    """
    if number_format.subscales(torch.ones(1, 32, dtype=torch.float32)) is None:
        return None

    def factors(t: Tensor) -> Tensor:
        of_both = number_format.subscales(t.repeat_interleave(_PAIR).contiguous())
        assert of_both is not None
        return of_both[::_PAIR]

    return steps_of(factors, signed=False)


def _scale_steps(number_format: NumberFormat, spec: QTensorConfig, *, negative: bool) -> Steps | None:
    """Return the step function that computes the scale for a range with one end at 0.

    The function maps the magnitude of the other end to the scale. If ``negative`` is true, the range is
    [-end, 0]; otherwise it is [0, end]. Return None if the function has too many steps.
    """
    zero = torch.zeros(1, dtype=torch.float32)

    def scale(end: Tensor) -> Tensor:
        zeros = zero.expand_as(end)
        ends = (-end, zeros) if negative else (zeros, end)
        return number_format.qparams(*ends, spec).scale.float()

    return steps_of(scale, signed=False)


def _looked_up(ops: Ops, steps: Steps, x: ir.Value) -> ir.Value:
    """Add a node that looks up ``x`` in the table of a step function, and return its output.

    The node calls a function such as ``LookUp5``, which searches a table of ``2^5`` values.
    """
    bits = max(1, (len(steps.values) - 1).bit_length())

    def binary_search(f: Ops, x: ir.Value, thresholds: ir.Value, values: ir.Value) -> ir.Value:
        place = f.constant(0)
        for bit in reversed(range(bits)):
            further = f("Add", place, f.constant(1 << bit))
            place = f("Where", f("GreaterOrEqual", x, f("Gather", thresholds, further)), further, place)
        return f("Where", f("IsNaN", x), x, f("Gather", values, place))

    missing = (1 << bits) - len(steps.values)
    # Pad the thresholds with one −inf at the start and with +inf at the end, so that no finite number selects
    # an entry that is only padding.
    thresholds = torch.cat(
        [torch.full((1,), -torch.inf, dtype=torch.float32), steps.thresholds, torch.full((missing,), torch.inf, dtype=torch.float32)]
    )
    values = torch.cat([steps.values, steps.values[-1:].expand(missing)])
    tables = {"thresholds": ops.constant(thresholds), "values": ops.constant(values)}
    return ops.function(f"LookUp{bits}", binary_search, _LOOK_UP.format(1 << bits), x=x, **tables)


_LOOK_UP = "Returns values[i] for the last i with thresholds[i] <= x. NaN stays NaN. Both tables have {} entries, and thresholds ascend."


def name_of(quantizer: TensorQuantizer) -> str:
    """Return a name for the spec of a quantizer, such as ``fp4_per_group32_e8m0``.

    Two different specs can have the same name, but the results of `described` differ.
    """
    name = "_then_".join(_name(level) for level in levels(quantizer.spec))
    return re.sub(r"\W", "_", name)


def described(quantizer: TensorQuantizer) -> str:
    """Return a string with two parts: the spec of a quantizer as JSON, and the granularity of its scales."""
    return f"{json.dumps([level.to_dict() for level in levels(quantizer.spec)])}, {quantizer.granularity}"


def _name(spec: QTensorConfig) -> str:
    """Return a name for a spec: the values of the fields that affect how an activation is rounded.

    The name leaves out fields that have the usual value.
    """
    size = spec.group_size or ""
    parts = [spec.dtype.name, "" if spec.qscheme is None else f"{spec.qscheme.value}{size}"]
    parts += ["" if spec.scale_format in (None, "float32") else str(spec.scale_format), spec.scale_calculation_mode or ""]
    parts += ["" if spec.scale_type is None or spec.scale_type.value.startswith("float") else spec.scale_type.value]
    parts += ["" if spec.round_method is None or spec.round_method.name == "half_even" else spec.round_method.name]
    return "_".join(filter(None, parts))
