"""Checks that number formats, packings and observers fulfil their contracts. The checks use a small
tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quark.numbers.number_format import QParams
from quark.numbers.observer import Observer
from quark.numbers.on_grid import LOSSY, off_grid, same_bits, scale_values_error, scales_error
from quark.numbers.single_level import SingleLevelQuantizer
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.plugins import Source, observers
from quark.plugins.attribution import Origin, attributed, origin

_SHAPES = ((16, 64), (16, 128), (64, 64), (128, 128), (16, 256), (256, 256), (16, 1024), (1024, 1024))
"""Shapes of the tensor, smallest first: the first one that the granularity can divide is used."""
_ORDERS = ("reorder", "order")
_BEYOND = 3.0
"""Factor by which values exceed the range of the scales: they must saturate."""
_VALUES = 4097
"""Number of evenly spaced values that are rounded: enough for formats up to 9 bits."""
_FAR = float(torch.finfo(torch.float32).max)
_SLACK = 1e-6
"""Relative error of float32 arithmetic on such values."""


def refuse_broken(quantizer: TensorQuantizer, *, activation: bool) -> None:
    """Check a quantizer's number format, packing and observers on a small tensor. Each quantizer is checked
    once.

    Ranges must be finite, and scales must be positive. Rounding must be in place. It must not create NaN from
    other values, and must return NaN for NaN. Its results must have codes, even if inputs are far out of
    range. Packing and unpacking must return the same codes and scales. Rounding must preserve the order of
    values. The largest rounded value must be the declared maximum, and larger inputs must saturate at it.
    There must be no more values than the declared bits can represent.

    Args:
        quantizer: The quantizer of a valid spec.
        activation: Whether the tensor is an activation. Codes of activations are never stored.

    Raises:
        PluginError: A check fails. The message names the plugin, the format or observer, and the error.
    """
    _check(quantizer, activation)


@lru_cache(maxsize=1024)
@torch.no_grad()
def _check(quantizer: TensorQuantizer, activation: bool) -> None:
    shape = next((s for s in _SHAPES if quantizer.shape_error(s) is None), None)
    if shape is None:
        return
    levels = sorted(quantizer.levels, key=lambda level: level is not quantizer.stored_level)
    whose = origin("formats", quantizer.stored_level.format.name)
    x = _example(shape)
    if not quantizer.is_float:
        for level in levels:
            _check_observer(level, x)
    with attributed(f"being tried on a tensor of shape {list(shape)}", whose):
        for level in levels:
            if (error := _rounding_error(level, x)) is not None:
                raise origin("formats", level.format.name).error(error)
        if (error := _values_error(quantizer, x, activation)) is not None:
            raise whose.error(error)
        for level in levels:
            if (error := _values_of_format_error(level)) is not None:
                raise origin("formats", level.format.name).error(error)


def _example(shape: tuple[int, ...]) -> Tensor:
    """Return a test tensor. It has a row of zeros, a row of positive values and a row of negative values.

    The other rows are normally distributed with different standard deviations. Each call returns the same
    values.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float32) * 2.0 ** (torch.arange(shape[0]) % 13 - 6)[:, None]
    x[0], x[1], x[2] = 0.0, x[1].abs(), -x[2].abs()
    return x


def _check_observer(level: SingleLevelQuantizer, x: Tensor) -> None:
    name = level.observer_class.__name__
    record = next((r for r in observers() if r.class_name == name), None)
    whose = Origin(f"the observer {name}", Source("", module=level.observer_class.__module__))
    whose = whose if record is None else origin("observers", record.name)
    before = x.clone()
    with attributed("being tried", whose):
        observer: Observer = level.observer()
        observer.observe(x)
        low, high = observer.range()
    if not torch.equal(x, before):
        raise whose.error("changes the tensor that it observes")
    wanted = level.granularity.scale_shape(tuple(x.shape))
    for end in (low, high):
        if not isinstance(end, Tensor) or tuple(end.shape) != wanted:
            raise whose.error(f"gives a range of shape {list(getattr(end, 'shape', ()))} instead of {list(wanted)}")
        if end.dtype != torch.float32 or not bool(torch.isfinite(end).all()):
            raise whose.error("gives a range that is not finite, or not in float32")
    if bool((low > high).any()):
        raise whose.error("gives a range whose low end lies above its high end")


def _rounding_error(level: SingleLevelQuantizer, x: Tensor) -> str | None:
    """Return why the rounding of a format is wrong, as a verb phrase. Return None if no error is found."""
    if level.is_float:
        return None
    t = level.granularity.rows(x.clone()).contiguous()
    number_format = level.format
    if number_format.table_shape is not None:
        table: Any = level.find_qparams(x).table
        if not isinstance(table, Tensor) or tuple(table.shape) != number_format.table_shape or table.dtype != torch.float32:
            return f"learns no table of its table_shape {list(number_format.table_shape)} in float32"
        number_format = number_format.with_table(table)
    rounded: Any = number_format.round_(t)
    if not isinstance(rounded, Tensor) or rounded.data_ptr() != t.data_ptr() or rounded.shape != t.shape:
        return "does not round in place: round_ returns another tensor than it was given"
    if not bool(torch.isfinite(rounded).all()):
        return "rounds finite values to NaN or Inf"
    t.view(-1)[0] = torch.nan
    return None if bool(number_format.round_(t).view(-1)[0].isnan()) else "hides NaN: round_ makes a number of it"


def _values_of_format_error(level: SingleLevelQuantizer) -> str | None:
    """Return the error in the values of a format, as a verb phrase. Return None if no error is found.

    The function does not check formats that round vectors, because their single elements have no order.
    """
    if level.is_float or level.spec.is_scale_quant or level.format.vector > 1 or level.format.table_shape is not None:
        return None
    bits, top = level.format.bits, float(level.format.max_magnitude(level.spec))
    if not 0 < top < torch.inf:
        return f"says max_magnitude={top} instead of a positive number"
    end = min(_BEYOND * top, _FAR / 2)
    t = torch.cat(
        [
            torch.tensor([-_FAR], dtype=torch.float32),
            torch.linspace(-end, end, _VALUES, dtype=torch.float32),
            torch.tensor([_FAR], dtype=torch.float32),
        ]
    )
    rounded = level.format.element_format().round_(t.clone())
    steps = rounded.diff()
    steps[[0, -1]] = -steps[[0, -1]].abs()  # beyond the range, rounded values must not change
    worst = int(steps.argmin())
    if steps[worst] < 0:
        less, more = (f"{t[i]:g} to {rounded[i]:g}" for i in (worst, worst + 1))
        return f"rounds {less} and {more}: order must be kept, and values beyond max_magnitude={top:g} must saturate"
    values = rounded.unique()
    # A format without 0 in its middle, such as an unsigned one, reaches half its span about a zero point.
    reached = float(values[-1] - values[0]) / 2
    if abs(reached - top) > float(values[-1] - values[-2]) / 2 * (1 + _SLACK):
        return f"says max_magnitude={top:g}, and its values reach {reached:g}"
    if len(values) > 2**bits * (1 + _SLACK):
        return f"says bits={bits:g}, enough for {2**bits:.0f} values, but has {len(values)}"
    return None


def _values_error(quantizer: TensorQuantizer, x: Tensor, activation: bool) -> str | None:
    """Return why scales, values, codes or packing are wrong, as a verb phrase. Return None if no error is
    found."""
    shape = tuple(x.shape)
    qparams: Any = quantizer.find_qparams(x) if not quantizer.is_float else QParams(torch.ones((), dtype=torch.float32))
    if not isinstance(qparams, QParams):
        return f"gives {qparams!r} instead of QParams"
    # A static activation has fewer scales than one call finds.
    if (error := scale_values_error(qparams) if activation else scales_error(quantizer, qparams, shape)) is not None:
        return error
    if not activation and qparams.outer_scale is not None and tuple(qparams.outer_scale.shape) not in ((), shape[:1]):
        return (
            f"has an outer scale of shape {list(qparams.outer_scale.shape)} for a weight of shape {list(shape)}: an outer scale is one for "
            f"the whole tensor, [], or one for each row, [{shape[0]}]; parts of a row cannot have outer scales of their own"
        )
    beyond = x * _BEYOND
    values: Any = quantizer.fake_quantize(beyond, qparams)
    if not isinstance(values, Tensor) or values.shape != x.shape:
        return f"rounds a tensor of shape {list(shape)} to {getattr(values, 'shape', values)}"
    if activation:
        return None  # nobody stores its codes
    if (error := off_grid(values, quantizer.dequantize(quantizer.codes_of(values, qparams), qparams))) is not None:
        return f"{error} (values beyond the range must saturate)"
    codes = quantizer.quantize(beyond, qparams)
    if off_grid(values, quantizer.dequantize(codes, qparams)) is not None:
        return "has codes that disagree with its rounded values: decode(encode(t)) differs from round(t)"
    return _packing_error(quantizer, codes, qparams)


def _packing_error(quantizer: TensorQuantizer, codes: Tensor, qparams: QParams) -> str | None:
    shape = tuple(codes.shape)
    for order in _ORDERS:
        packed = quantizer.pack(codes, qparams, order=order)
        unpacked, scales = quantizer.unpack(packed, shape, order=order)
        if not same_bits(unpacked, codes):
            return LOSSY
        if quantizer.is_float:
            continue
        before, after = dict(qparams.items()), dict(scales.items())
        if before.keys() != after.keys() or any(not torch.equal(before[n].float(), after[n].float()) for n in before):
            return "has scales that do not survive packing: unpack_qparams(pack_qparams(q)) differs from q"
    return None
