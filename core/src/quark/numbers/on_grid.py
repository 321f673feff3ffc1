"""Functions that check the values, codes and scales that algorithms and loaders store in a model.

If a tensor is large, some checks use only a sample of its rows.
"""

from __future__ import annotations

from functools import lru_cache

import attrs
import torch
from torch import Tensor

from quark.numbers.granularity import Granularity
from quark.numbers.number_format import QParams
from quark.numbers.tensor_quantizer import TensorQuantizer


def sample_of_rows(granularity: Granularity, shape: tuple[int, ...], elements: int) -> slice | None:
    """Return a slice that selects rows with about ``elements`` elements in total, or None to use the whole
    tensor.

    The rows are evenly spread over the tensor if each row has its own scales or all rows share them.

    Args:
        granularity: The granularity of the scales. Of rows that share scales, the slice selects all or none.
        shape: The shape of the tensor. Only matrices are sampled.
        elements: The wanted size of the sample. A sample has at least one row, or at least one set of rows
            that share their scales.
    """
    count = max(1, elements // max(1, shape[-1]))
    if len(shape) != 2 or count >= shape[0]:
        return None
    if (high := granularity.rows_per_scale) > 1:
        return slice(0, max(high, count // high * high))
    return slice(None, None, -(-shape[0] // count) | 1)  # odd, so that not all rows are the same row of an attention head


def qparams_of_rows(granularity: Granularity, shape: tuple[int, ...], qparams: QParams, rows: slice) -> QParams:
    """Return the scales of the rows ``rows`` of a matrix with shape ``shape``.

    If some rows share scales, ``rows`` must select all of them or none of them.
    """

    def part(tensor: Tensor) -> Tensor:
        return granularity.reduce_scale(granularity.expand_scale(tensor, shape)[rows], (len(range(*rows.indices(shape[0]))), shape[1]))

    zero, outer = qparams.zero_point, qparams.outer_scale
    outer = outer if outer is None or outer.ndim == 0 else outer[rows]
    return attrs.evolve(qparams, scale=part(qparams.scale), zero_point=None if zero is None else part(zero), outer_scale=outer)


SAMPLE = 1 << 13
"""Number of elements that are checked if a check of the whole tensor would take too long.

The checked elements are those of whole rows, which are evenly spread over the tensor.
"""


@torch.no_grad()
def grid_error(
    quantizer: TensorQuantizer, qparams: QParams | None, values: Tensor, codes: Tensor | None = None, *, sampled: bool = False
) -> str | None:
    """Return why values are not on a quantizer's grid or why their scales are unusable, or None if both are
    valid.

    The function checks every scale and, unless ``sampled`` is set, every element. This takes about as long as
    rounding the tensor.

    Args:
        quantizer: The quantizer of the tensor.
        qparams: The scales, or None if they are not set.
        values: A weight or a bias, on any device.
        codes: The codes that should represent the values. If ``codes`` is None, the function computes the
            codes from the values.
        sampled: Whether to check only a sample of about `SAMPLE` elements. All elements are still checked for
            NaN and Inf.

    Returns:
        A verb phrase that describes the error, such as ``"holds NaN or Inf"``, or None if there is no error.
    """
    if (wrong := scales_error(quantizer, qparams, tuple(values.shape))) is not None:
        return wrong
    shape = tuple(values.shape)
    rows = sample_of_rows(quantizer.granularity, shape, SAMPLE) if sampled and qparams is not None else None
    every = values
    if rows is not None and qparams is not None:
        values, codes = values[rows], None if codes is None else codes[rows]
        qparams = qparams_of_rows(quantizer.granularity, shape, qparams, rows)
    scales = qparams or QParams(values.new_ones((), dtype=torch.float32))
    decoded = quantizer.dequantize(quantizer.codes_of(values, scales) if codes is None else codes, scales)
    if every is values:
        return off_grid(values, decoded)
    # One read from the device for both: NaN and Inf survive a sum. If the sum overflows, elements are tested.
    if bool(every.sum(dtype=torch.float32).isfinite() & (decoded.to(values.dtype) == values).all()):
        return None
    return off_grid(values, decoded) if bool(every.isfinite().all()) else "holds NaN or Inf"


@torch.no_grad()
def codes_error(
    quantizer: TensorQuantizer, qparams: QParams, values: Tensor, codes: Tensor, order: str, *, is_rounded: bool = True
) -> str | None:
    """Return an error if the values differ from the codes, if the scales are unusable, or if packing loses
    codes. Otherwise return None.

    The function checks every scale, and a sample of about `SAMPLE` codes. The error is a verb phrase. If
    packing loses codes, the error is `LOSSY`.

    Args:
        quantizer: The quantizer of the tensor.
        qparams: The scales.
        values: A weight. It can have the shape ``[O, I]`` or any other shape.
        codes: The codes of all values.
        order: The order of 4-bit codes in a word.
        is_rounded: Whether the values are rounded already. If they are not, the function rounds the sample
            before it compares.
    """
    if (wrong := scales_error(quantizer, qparams, tuple(values.shape))) is not None or values.numel() == 0:
        return wrong
    rows = sample_of_rows(quantizer.granularity, tuple(values.shape), SAMPLE)
    if rows is not None:
        values, codes, qparams = values[rows], codes[rows], qparams_of_rows(quantizer.granularity, tuple(values.shape), qparams, rows)
    if not is_rounded:
        values = quantizer.fake_quantize(values, qparams)
    if (wrong := off_grid(values, quantizer.dequantize(codes, qparams))) is not None:
        return wrong
    unpacked, _ = quantizer.unpack(quantizer.pack(codes, qparams, order=order), tuple(codes.shape), order=order)
    return None if same_bits(unpacked, codes) else LOSSY


LOSSY = "has codes that do not survive packing: unpack(pack(codes)) differs from them"
"""The error if a `quark.numbers.Packing` does not restore the codes that it has packed."""


def scales_error(quantizer: TensorQuantizer, qparams: QParams | None, shape: tuple[int, ...]) -> str | None:
    """Return why the scales of a tensor with shape ``shape`` are unusable, as a verb phrase. Return None if
    the scales are valid."""
    if quantizer.is_float:
        return None
    if qparams is None:
        return "has no scales: the quantizer's set_qparams was not called"
    expected, present = _scale_shapes(quantizer, shape), dict(qparams.items())
    if absent := [name for name in expected if name not in present]:
        return f"has no {' and no '.join(absent)}"
    for name, shape_wanted in expected.items():
        if tuple(present[name].shape) != shape_wanted:
            return f"has a {name} of shape {list(present[name].shape)} instead of {list(shape_wanted)}"
    return scale_values_error(qparams)


def scale_values_error(qparams: QParams) -> str | None:
    """Return why the values in ``qparams`` are unusable, as a verb phrase. Return None if all values are
    valid.

    The function does not check shapes.
    """
    if qparams.table is not None and not bool(qparams.table.isfinite().all()):
        return "has a table that holds NaN or Inf"
    bad = [name for name, tensor in qparams.items() if name not in ("zero_point", "table") and not _are_usable(tensor)]
    return f"has a {bad[0]} that is NaN, infinite, zero or negative" if bad else None


def off_grid(values: Tensor, decoded: Tensor) -> str | None:
    """Return how values differ from dequantized codes, as a verb phrase. Return None if they are equal.

    Args:
        values: The values in the model's dtype.
        decoded: The dequantized codes, as float32 values.
    """
    if torch.equal(back := decoded.to(values.dtype), values):
        return None
    if not bool(torch.isfinite(values).all()):
        return "holds NaN or Inf"
    worst = float((back.float() - values.float()).abs().max())
    return f"holds values that no code represents: they differ from their decoded codes by up to {worst:.3g}"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal in shape, dtype and every bit.

    The function compares bytes, because torch cannot compare some 8-bit floats.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _are_usable(scales: Tensor) -> bool:
    """Return whether all scales are positive and finite. The function reads the scales only once.

    If a scale is NaN, `torch.aminmax` returns NaN for the minimum and the maximum, and both comparisons are
    false.
    """
    if scales.numel() == 0:
        return True
    low, high = torch.aminmax(scales.float())
    return bool((low > 0) & (high < torch.inf))


# Cached, because a model has few shapes. Not computed on the meta device, where some operations make torch
# import modules for seconds on their first call.
@lru_cache(maxsize=1024)
def _scale_shapes(quantizer: TensorQuantizer, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in quantizer.empty_qparams(shape, "cpu").items()}
