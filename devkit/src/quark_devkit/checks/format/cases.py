"""Cases for checks of number formats: accepted specs, all values of a format, and numbers to round."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import NumberFormat, TensorQuantizer
from quark_devkit.check import assume, complaining, require
from quark_devkit.example_specs import SHAPE, Example, examples
from quark_devkit.subject import Subject

COLUMNS = 64
"""Length of a row of values: every group size of the example specs divides it."""
_MOST_BITS = 16
_LARGEST = 1e38
"""Above this, the sum of two numbers exceeds the range of float32."""


@attrs.frozen(eq=False)
class Case:
    """A spec of the format.

    Attributes:
        example: The spec as written, and the quantizer of a weight with this spec.
        error_bound: ``error_bound`` of the format's record.
    """

    example: Example
    error_bound: float | None = None

    @property
    def quantizer(self) -> TensorQuantizer:
        """The quantizer of the whole tensor."""
        return self.example.quantizer

    @property
    def format(self) -> NumberFormat:
        """The format with the spec's rounding method. A format that learns tables has a learned table."""
        return _with_table(self.quantizer)

    @property
    def spec(self) -> QTensorConfig:
        """The canonical spec."""
        return self.quantizer.stored_level.spec

    @property
    def max_magnitude(self) -> float:
        """The format's largest magnitude for the spec."""
        return float(self.format.max_magnitude(self.spec))

    @property
    def is_scale(self) -> bool:
        """Whether the values of the format are only scales, and so positive."""
        return self.example.spec.is_scale_quant

    def __str__(self) -> str:
        return str(self.example)


@lru_cache(maxsize=1024)
def _with_table(quantizer: TensorQuantizer) -> NumberFormat:
    number_format = quantizer.stored_level.format
    if number_format.table_shape is None:
        return number_format
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    table = quantizer.find_qparams(weight).table
    require(table is not None, "has a table_shape, but finds qparams without a table")
    return number_format.with_table(table)  # type: ignore[arg-type]


def refuse_vectors(case: Case) -> None:
    """Raise NotApplicableError for formats whose elements are rounded together."""
    assume(case.format.vector == 1, "the format rounds several elements together, so single elements have no order")


def cases(subject: Subject) -> list[Case]:
    """Return a case for each granularity that the format accepts, with and without zero points.

    Raises:
        NotApplicableError: The format accepts none of the example specs.
    """
    own = subject.load("format").name
    own_examples = [example for example in examples([subject.name]) if example.quantizer.stored_level.format.name == own]
    found = [Case(example, subject.record.error_bound) for example in own_examples]
    assume(found, "no example spec of this format is accepted")
    return found


def one_case(subject: Subject) -> list[Case]:
    """Return only the first case, without zero points if possible."""
    return [min(cases(subject), key=lambda case: case.spec.symmetric is False)]


def weight_cases(subject: Subject) -> list[Case]:
    """Return the cases of a format whose values are elements of tensors, not only scales.

    Raises:
        NotApplicableError: The values of the format are only scales.
    """
    found = [case for case in cases(subject) if not case.is_scale]
    assume(found, "the format holds scales only")
    return found


def one_weight_case(subject: Subject) -> list[Case]:
    """Return the first case of `weight_cases` alone."""
    return weight_cases(subject)[:1]


def scaled_cases(subject: Subject, among: Callable[[Subject], list[Case]] = cases) -> list[Case]:
    """Return those cases of ``among`` that have scales.

    Raises:
        NotApplicableError: There is no such case.
    """
    found = [case for case in among(subject) if not case.quantizer.is_float]
    assume(found, "the format casts and has no scales")
    return found


def scaled_weight_cases(subject: Subject) -> list[Case]:
    """Return the weight cases with scales.

    Raises:
        NotApplicableError: There is no such case.
    """
    return scaled_cases(subject, weight_cases)


def shares_bits(number_format: NumberFormat) -> bool:
    """Whether neighbours share bits, so that no element can be rounded alone."""
    return number_format.element_format() is not number_format


def all_codes(number_format: NumberFormat) -> Tensor | None:
    """Return every code, in the storage dtype. Return None if neighbours share bits, or if there are more
    than 2^16 codes."""
    dtype, count = number_format.storage_dtype, int(2**number_format.bits + 1e-6)
    if shares_bits(number_format) or number_format.vector > 1 or number_format.bits > _MOST_BITS:
        return None
    if dtype.is_floating_point:
        whole: Any = torch.uint8 if dtype.itemsize == 1 else torch.int16
        return torch.arange(1 << (8 * dtype.itemsize)).to(whole).view(dtype)
    low = -(count // 2) if dtype.is_signed else 0
    return torch.arange(low, low + count).to(dtype)


def all_values(number_format: NumberFormat) -> Tensor | None:
    """Return every finite value, in ascending order, as float32; None if `all_codes` returns None."""
    codes = all_codes(number_format)
    if codes is None:
        return None
    with complaining(f"cannot decode all {len(codes):,} codes of {number_format.bits:g} bits, which a damaged file may hold", Exception):
        values = number_format.decode(codes)
    return values[values.isfinite()].unique()


def numbers(case: Case, *, beyond: float = 1.0) -> Tensor:
    """Return numbers to round in ascending order, as a float32 tensor ``[rows, COLUMNS]``.

    If the format's values can be listed, the numbers include midpoints between values and the numbers next to
    midpoints.

    Args:
        case: The case. If the format is for scales, the numbers are positive.
        beyond: The largest number, as a multiple of ``max_magnitude``. Formats that cast always get 1, since
            a cast does not saturate.
    """
    top = min(case.max_magnitude, _LARGEST) * (1 if case.quantizer.is_float else beyond)
    values = all_values(case.format)
    powers = top * 2.0 ** -torch.linspace(0, 60, 400, dtype=torch.float32)
    parts = [torch.linspace(-top, top, 2049, dtype=torch.float32), powers, -powers]
    if values is not None:
        some = values[:: max(1, len(values) // 512)]
        middle = ((some[1:].double() + some[:-1].double()) / 2).float()
        parts += [some, middle, *(torch.nextafter(middle, torch.full_like(middle, end)) for end in (torch.inf, -torch.inf))]
    t = torch.cat([*parts, torch.zeros(1, dtype=torch.float32)]).clamp(-top, top)
    if case.is_scale:
        smallest = float(torch.finfo(torch.float32).tiny)
        t = t.abs().clamp(min=smallest if values is None else max(smallest, float(values[values > 0].min())))
    t = t.sort().values
    return torch.cat([t, t[-1:].expand(-len(t) % COLUMNS)]).view(-1, COLUMNS)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))
