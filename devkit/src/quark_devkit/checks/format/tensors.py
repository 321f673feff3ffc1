"""Checks of whole tensors in a format: scales for any range, values that equal the exported values, and
difficult data."""

from __future__ import annotations

import copy
from contextlib import suppress

import torch
from torch import Tensor

from quark.config.enums import ScaleType
from quark.errors import QuarkError
from quark.models.layers.packed_weight import FormatPacking, PackedWeight
from quark.models.layers.quantized_layers import QuantLinear
from quark.numbers import QParams, TensorQuantizer, quantizer_for
from quark_devkit.algorithm_runs import accelerator
from quark_devkit.check import CheckFailedError, assume, check, complaining, require
from quark_devkit.checks.format.cases import COLUMNS, Case, one_weight_case, same_bits, scaled_cases, shares_bits, weight_cases
from quark_devkit.example_specs import SHAPE
from quark_devkit.fresh_process import in_fresh_process
from quark_devkit.subject import Subject
from quark_devkit.works import wide_data

_WIDE = (None, ScaleType.float, ScaleType.float32)
_RANGES = {
    "zeros": (0.0, 0.0),
    "positive values": (0.5, 3.0),
    "negative values": (-3.0, -0.5),
    "one value": (0.7, 0.7),
    "both signs": (-1.0, 2.0),
    "a subnormal range": (-1e-40, 1e-40),
    "the smallest range": (-3e-44, 3e-44),
    "a tiny range": (-1e-30, 1e-30),
    "a large range": (-1e4, 1e4),
}
_SLACK = 0.07
"""Relative error of a scale in the coarsest scale format, with three mantissa bits."""
_HUGE = {"a huge range": (-1e38, 1e38)}


def _data(seed: int = 0) -> Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (torch.arange(SHAPE[0]) % 13 - 6)[:, None]
    x[0], x[1], x[2] = 0.0, x[1].abs(), -x[2].abs()
    return x


@check("format", each=scaled_cases)
def gives_usable_scales(case: Case) -> None:
    """``qparams`` returns finite positive scales with the shape of the ranges, also for empty, one-sided,
    tiny and huge ranges.
    """
    is_wide = case.spec.scale_type in _WIDE and case.spec.scale_format in (None, "float32", "e8m0")
    for name, ends in {**_RANGES, **(_HUGE if is_wide else {})}.items():
        low, high = (torch.full((3, 5), end) for end in ends)
        held = low.clone(), high.clone()
        qparams = case.format.qparams(low, high, case.spec)
        require(torch.equal(low, held[0]) and torch.equal(high, held[1]), "changes the ranges that it gets")
        require(isinstance(qparams, QParams), f"returns {qparams!r}, not QParams")
        scale = qparams.scale
        require(tuple(scale.shape) == (3, 5), f"returns scales of shape {list(scale.shape)} for ranges of shape [3, 5]")
        require(scale.dtype in (torch.float32, torch.float16, torch.bfloat16), f"returns scales in {scale.dtype}")
        is_usable = bool(scale.float().isfinite().all()) and bool((scale > 0).all())
        require(is_usable, f"returns the scale {float(scale[0, 0])} for {name}")


@check("format", each=scaled_cases)
def has_scales_that_fit_the_range(case: Case) -> None:
    """``max_magnitude`` times the scale equals the larger end of the range, within a factor of two for
    power-of-two scales.
    """
    for low, high in ((-1.0, 2.0), (-3.0, 3.0), (-5.5, 0.5)):
        qparams = case.format.qparams(torch.full((4,), low), torch.full((4,), high), case.spec)
        wanted = (high - low) / 2 if qparams.zero_point is not None else max(-low, high)
        share = float(qparams.scale[0]) * case.max_magnitude / wanted
        fits = 0.5 * (1 - _SLACK) <= share <= 2 * (1 + _SLACK)
        require(fits, f"gives a scale that spans {share:.3g} times the range from {low} to {high}")


@check("format", each=weight_cases)
def simulates_what_it_exports(case: Case) -> None:
    """Rounded values equal the dequantized codes, before and after packing, to the bit, in float32 and in
    16-bit models."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = _data().to(dtype)
        values, qparams = case.quantizer.round_to_nearest(x)
        is_like_x = values.dtype is dtype and values.shape == x.shape
        require(is_like_x, f"rounds {dtype} to {values.dtype} of shape {list(values.shape)}")
        codes = case.quantizer.codes_of(values, qparams)
        exported = case.quantizer.dequantize(codes, qparams).to(dtype)
        require(torch.equal(exported, values), f"has values in a {dtype} model that differ from decode(codes)")
        read, scales = case.quantizer.unpack(case.quantizer.pack(codes, qparams), SHAPE)
        loaded = case.quantizer.dequantize(read, scales).to(dtype)
        require(torch.equal(loaded, values), f"has different values after export and loading, in {dtype}")


@check("format", since=2, each=weight_cases)
def unpacks_by_parts(case: Case) -> None:
    """A packed weight unpacks to the rounded values, to the bit, at every call: as a whole, in slices of
    rows, and row by row.
    """
    values, qparams = case.quantizer.round_to_nearest(_data())
    packing = FormatPacking(case.quantizer, "reorder", QuantLinear.as_stored)
    tensors = packing.pack(case.quantizer.codes_of(values, qparams), qparams)
    weight, rows = PackedWeight(packing, tensors, SHAPE, torch.float32), torch.tensor([37, 5, 63, 5])
    for time in ("first", "second"):
        parts = torch.cat([weight.part(part).values() for part in weight.row_slices(SHAPE[1])])
        for how, found in {"by slices": parts, "whole": weight.values(), "row by row": weight.looked_up(rows)}.items():
            same = torch.equal(found, values[rows] if how == "row by row" else values)
            require(same, f"has different values after packing, unpacked {how}, for the {time} time")


@check("format")
def knows_which_codes_survive(subject: Subject) -> None:
    """If ``spacing`` says that codes survive a cast, the cast values have the same codes."""
    found = 0
    for case in weight_cases(subject):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for x in (_data(1).to(dtype), torch.rand(SHAPE, generator=torch.Generator().manual_seed(2)).to(dtype)):
                values, qparams = case.quantizer.round_to_nearest(x)
                if not case.quantizer.recovers_codes(dtype, qparams):
                    continue
                found += 1
                same = same_bits(case.quantizer.quantize(x, qparams), case.quantizer.codes_of(values, qparams))
                require(same, f"declares a spacing that says codes survive a cast to {dtype}, but they do not ({case})")
    assume(found, "the format has no spacing")


@check("format", level="advisory", each=weight_cases)
def works_on_an_accelerator(case: Case) -> None:
    """Values, codes and packed codes on a (simulated) accelerator stay on the accelerator, and equal the
    values and codes on a CPU, to the bit.
    """
    with accelerator() as device:
        results = [_all_of(case, _data().to(place)) for place in (device.name, "cpu")]
        found, expected = ({name: x for name, x in result.items() if x is not None} for result in results)
        elsewhere = [name for name, x in found.items() if x.device.type != device.name]
        require(not elsewhere, f"leaves {' and '.join(elsewhere)} on another device than the tensor")
        different = [name for name, x in found.items() if not same_bits(x.cpu(), expected[name])]
    require(
        not different, f"returns different {' and '.join(different)} on an accelerator (divide by numbers with quark.base.scalars.divided)"
    )


def _all_of(case: Case, x: Tensor) -> dict[str, Tensor | None]:
    """Return all results for a weight, by name."""
    values, qparams = case.quantizer.round_to_nearest(x)
    codes = case.quantizer.codes_of(values, qparams)
    packed = case.quantizer.pack(codes, qparams, order="reorder")
    unpacked, _ = case.quantizer.unpack(packed, tuple(codes.shape), order="reorder")
    stored = dict(packed.items()) if hasattr(packed, "items") else {}
    values_of_codes = case.quantizer.dequantize(codes, qparams)
    return {"values": values, "codes": codes, "unpacked codes": unpacked, "values of codes": values_of_codes, **stored}


@check("format", since=2, each=weight_cases)
def serves_rows_of_any_length(case: Case) -> None:
    """Codes decode to the rounded values in every column: for rows of 1, 1,000, 4,097 and 14,336 columns, for
    a single row, and for groups of one element."""
    for quantizer in (case.quantizer, *_of_groups_of_one(case)):
        for shape in ((1, 1), (3, 1), (1, 1000), (1, 4097), (2, 14336)):
            if quantizer.shape_error(shape) is not None:
                continue
            x = wide_data(shape)
            values, qparams = quantizer.round_to_nearest(x)
            codes = quantizer.codes_of(values, qparams)
            read, scales = quantizer.unpack(quantizer.pack(codes, qparams), shape)
            require(
                torch.equal(quantizer.dequantize(read, scales), values), f"has codes of shape {list(shape)} that decode to other values"
            )
            learns = case.format.table_shape is not None  # a learned table may depend on the order of the columns
            parts = case.spec.group_size or (COLUMNS if shares_bits(case.format) else case.format.vector)
            if quantizer is case.quantizer and shape[1] % parts == 0 and not learns:
                reverse = quantizer.fake_quantize(_backwards(x, parts))
                same = torch.equal(_backwards(reverse, parts), values)
                require(same, f"rounds a tensor of shape {list(shape)} to other values when its columns come in another order")


def _of_groups_of_one(case: Case) -> list[TensorQuantizer]:
    """Return the quantizer of the same spec with one element in each group; an empty list if the format
    refuses this spec."""
    if not case.spec.group_size or shares_bits(case.format):
        return []
    with suppress(QuarkError):
        return [quantizer_for(case.example.spec.set(group_size=1), activation=False)]
    return []


def _backwards(x: Tensor, size: int) -> Tensor:
    """Return a tensor with the same columns, cut into parts that are in reverse order."""
    return x.view(len(x), -1, size).flip(1).reshape(x.shape)


@check("format", since=2, each=one_weight_case)
def is_copied_and_pickled(case: Case) -> None:
    """A quantizer of the format can be copied deeply, and pickled for another process, as models are."""
    wanted = _rounded(case.quantizer)
    for how, compute in (
        ("copied deeply", lambda: _rounded(copy.deepcopy(case.quantizer))),
        ("pickled", lambda: in_fresh_process(_rounded, case.quantizer)),
    ):
        with complaining(f"cannot be {how}", Exception):
            found = compute()
        require(torch.equal(found, wanted), f"rounds to other values once it is {how}")


def _rounded(quantizer: TensorQuantizer) -> Tensor:
    return quantizer.fake_quantize(_data())


@check("format", each=weight_cases)
def serves_a_vector(case: Case) -> None:
    """A one-dimensional tensor, such as a bias, is quantized, exported and read back if the spec accepts its
    shape.
    """
    x = _data()[5]
    if case.quantizer.shape_error((64,)) is not None:
        return
    values, qparams = case.quantizer.round_to_nearest(x)
    codes = case.quantizer.codes_of(values, qparams)
    read, scales = case.quantizer.unpack(case.quantizer.pack(codes, qparams), (64,))
    require(torch.equal(case.quantizer.dequantize(read, scales), values), "reads a vector back with different values")


@check("format", each=weight_cases)
def does_not_change_the_tensor(case: Case) -> None:
    """Quantization does not change the input tensor and does not depend on its memory layout."""
    x = _data()
    values, qparams = case.quantizer.round_to_nearest(x)
    case.quantizer.quantize(x, qparams)
    require(torch.equal(x, _data()), "changes the tensor that it quantizes")
    strided = torch.zeros(SHAPE[0], 2 * SHAPE[1])
    strided[:, ::2] = x
    require(torch.equal(case.quantizer.fake_quantize(strided[:, ::2]), values), "rounds a strided tensor to different values")


@check("format")
def serves_hard_tensors(subject: Subject) -> None:
    """Zeros stay zeros; constants, outliers, subnormal and huge values give finite values at most three times
    as large.
    """
    outlier = _data()
    outlier[7, 9] = 1e4
    hard = {
        "a constant": torch.full(SHAPE, -0.7),
        "an outlier": outlier,
        "subnormal values": _data() * 1e-41,
        "tiny values": _data() * 1e-30,
        "values of 1e30": _data() * 1e30,
    }
    for case in weight_cases(subject):
        zeros = case.quantizer.fake_quantize(torch.zeros(SHAPE))
        require(not bool(zeros.any()), f"rounds a tensor of zeros to {float(zeros.abs().max())} ({case})")
        for name, x in hard.items():
            if name == "values of 1e30" and (case.quantizer.is_float or case.spec.scale_type not in _WIDE):
                continue
            values = case.quantizer.fake_quantize(x)
            require(bool(values.isfinite().all()), f"rounds {name} to NaN or infinity ({case})")
            most = 3 * float(x.abs().max()) + 1e-6  # the smallest scale may enlarge tiny numbers this much
            require(float(values.abs().max()) <= most, f"rounds {name} to values up to {float(values.abs().max()):.3g} ({case})")


@check("format", each=weight_cases)
def keeps_broken_values_visible(case: Case) -> None:
    """NaN or infinity does not become finite and does not affect rows with other scales."""
    clean = case.quantizer.fake_quantize(_data())
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = _data()
        x[40, 7] = bad
        values = case.quantizer.fake_quantize(x)
        if bad == bad and case.quantizer.is_float:
            require(float(values[40, 7]) == bad, f"casts {bad} to {float(values[40, 7])}")
            continue
        require(not bool(values.isfinite().all()), f"rounds a tensor with {bad} to finite values")
        if case.quantizer.granularity.is_local and case.format.table_shape is None:  # all rows share a table
            require(torch.equal(values[:40], clean[:40]), f"rounds rows differently because another row holds {bad}")


@check("format", each=weight_cases)
def serves_empty_tensors(case: Case) -> None:
    """A tensor without rows is quantized to a tensor of the same shape."""
    shape = (0, SHAPE[1])
    values = case.quantizer.fake_quantize(torch.zeros(shape))
    require(tuple(values.shape) == shape, f"rounds a tensor of shape {list(shape)} to shape {list(values.shape)}")


@check("format", needs="zero_point", level="optional")
def has_zero_points(subject: Subject) -> None:
    """Asymmetric specs have zero points (integers in int32) that reduce the error of one-sided data."""
    asymmetric = [case for case in weight_cases(subject) if case.spec.symmetric is False]
    require(asymmetric, "declares the capability zero_point, but accepts no asymmetric spec")
    symmetric = {case.quantizer.granularity: case for case in weight_cases(subject) if case.spec.symmetric is not False}
    x = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) + 0.05
    for case in asymmetric:
        values, qparams = case.quantizer.round_to_nearest(x)
        if (zero := qparams.zero_point) is None:
            raise CheckFailedError(f"returns no zero point for an asymmetric spec ({case})")
        require(zero.shape == qparams.scale.shape, f"returns zero points whose shape differs from the scales' ({case})")
        require(zero.dtype in (torch.int32, torch.float32), f"returns zero points in {zero.dtype} ({case})")
        other = symmetric.get(case.quantizer.granularity)
        if other is not None:
            errors = [float((y - x).norm()) for y in (values, other.quantizer.fake_quantize(x))]
            require(errors[0] < errors[1], f"rounds positive values no better with a zero point than without one ({case})")


@check("format")
def has_no_undeclared_zero_points(subject: Subject) -> None:
    """A format without the capability ``zero_point`` never returns zero points."""
    assume(not subject.declares("zero_point"), "it declares the capability zero_point")
    for case in scaled_cases(subject):
        low, high = torch.full((4,), 0.3), torch.full((4,), 2.0)
        has_zero = case.format.qparams(low, high, case.spec).zero_point is not None
        require(not has_zero, f"returns a zero point, but its record does not declare the capability zero_point ({case})")
