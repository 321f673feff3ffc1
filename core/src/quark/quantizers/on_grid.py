"""Whether values and scales are what codes can say: what plugins leave behind is looked at before it is believed."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quark.quantizers.granularity import PerBlock
from quark.quantizers.qparams import QParams
from quark.quantizers.tensor_quantizer import TensorQuantizer

SAMPLE = 1 << 13
"""Elements that are looked at where the whole tensor would take too long: whole rows, spread evenly."""


@torch.no_grad()
def misfit(quantizer: TensorQuantizer, qparams: QParams | None, values: Tensor) -> str | None:
    """What is wrong with values that are said to lie on a quantizer's grid, or with their scales; None where nothing is.

    Every element is looked at, in about the time that rounding it takes.

    Args:
        quantizer: Has the grid.
        qparams: The scales; None where they are not set.
        values: A weight or a bias, on any device.

    Returns:
        A predicate, such as ``"holds NaN or Inf"``.
    """
    if (wrong := wrong_scales(quantizer, qparams, tuple(values.shape))) is not None:
        return wrong
    scales = qparams or QParams(values.new_ones((), dtype=torch.float32))
    return off_grid(values, quantizer.dequantize(quantizer.codes_of(values, scales), scales))


@torch.no_grad()
def misfit_of_codes(quantizer: TensorQuantizer, qparams: QParams, values: Tensor, codes: Tensor, order: str) -> str | None:
    """As `misfit`, where the codes are at hand; and whether packing loses some. Scales are looked at in full, codes by `SAMPLE`.

    Args:
        quantizer: Has the grid.
        qparams: The scales.
        values: A weight ``[O, I]``, or of any other shape.
        codes: Of all of it.
        order: Of 4-bit codes in a word.
    """
    if (wrong := wrong_scales(quantizer, qparams, tuple(values.shape))) is not None or values.numel() == 0:
        return wrong
    values, codes, qparams = _sampled(quantizer, values, codes, qparams)
    if (wrong := off_grid(values, quantizer.dequantize(codes, qparams))) is not None:
        return wrong
    unpacked, _ = quantizer.unpack(quantizer.pack(codes, qparams, order=order), tuple(codes.shape), order=order)
    return None if same_bits(unpacked, codes) else LOSSY


LOSSY = "has codes that do not survive packing: unpack(pack(codes)) differs from them"


def wrong_scales(quantizer: TensorQuantizer, qparams: QParams | None, shape: tuple[int, ...]) -> str | None:
    """What is wrong with the scales of a tensor of that shape, as a predicate; None where nothing is."""
    if quantizer.is_float:
        return None
    if qparams is None:
        return "has no scales: the quantizer's set_qparams was not called"
    expected, present = _shapes(quantizer, shape), dict(qparams.items())  # type: ignore[arg-type]  # quantizers are hashed by identity
    if absent := [name for name in expected if name not in present]:
        return f"has no {' and no '.join(absent)}"
    for name, wanted in expected.items():
        if tuple(present[name].shape) != wanted:
            return f"has a {name} of shape {list(present[name].shape)} where {list(wanted)} is wanted"
    return unusable_scales(qparams)


def unusable_scales(qparams: QParams) -> str | None:
    """What is wrong with scales as numbers, whatever their shapes."""
    bad = [name for name, tensor in qparams.items() if name != "zero_point" and not _are_usable(tensor)]
    return f"has a {bad[0]} that is NaN, infinite, zero or negative" if bad else None


def off_grid(values: Tensor, said: Tensor) -> str | None:
    """How values differ from what their codes say, as a predicate; None where they do not.

    Args:
        values: In the model's dtype.
        said: By their codes, float32.
    """
    if torch.equal(back := said.to(values.dtype), values):
        return None
    if not bool(torch.isfinite(values).all()):
        return "holds NaN or Inf"
    worst = float((back.float() - values.float()).abs().max())
    return f"holds values that no codes stand for: they are up to {worst:.3g} away from what their codes say"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are alike in shape, dtype and every bit; torch compares small floats of some dtypes in no other way."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)) if one.ndim else bool(one == other)


def _are_usable(scales: Tensor) -> bool:
    """Whether all are positive and finite: one pass, for NaN is both the least and the greatest."""
    if scales.numel() == 0:
        return True
    low, high = torch.aminmax(scales.float())
    return bool((low > 0) & (high < torch.inf))


# A model has few shapes. Not by meta tensors: the first of some operations on them makes torch import for seconds.
@lru_cache(maxsize=1024)
def _shapes(quantizer: TensorQuantizer, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in quantizer.empty_qparams(shape, "cpu").items()}


def _sampled(quantizer: TensorQuantizer, values: Tensor, codes: Tensor, qparams: QParams) -> tuple[Tensor, Tensor, QParams]:
    """Some rows of a matrix with their scales; other tensors as they are."""
    wanted = max(1, SAMPLE // max(1, values.shape[-1]))
    if values.ndim != 2 or wanted >= values.shape[0]:
        return values, codes, qparams
    granularity, shape = quantizer.granularity, tuple(values.shape)
    if isinstance(granularity, PerBlock):
        high = granularity.size[0]
        rows = slice(0, max(high, wanted // high * high))
    else:
        rows = slice(None, None, -(-shape[0] // wanted))

    def part(tensor: Tensor) -> Tensor:
        return granularity.reduce_scale(granularity.expand_scale(tensor, shape)[rows])

    zero, outer = qparams.zero_point, qparams.outer_scale
    outer = outer if outer is None or outer.ndim == 0 else outer[rows]
    return values[rows], codes[rows], QParams(part(qparams.scale), None if zero is None else part(zero), outer)
