"""Round methods: each gives AMD Quark's values, with codes that decode to them, whatever else a spec says."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quark
from quark.config.enums import RoundType
from quark.config.tensor import QTensorConfig
from quark.errors import QuarkError
from quark.numbers import TensorQuantizer, format_of, number_format, quantizer_for
from quark.numbers.self_check import refuse_broken
from quark_schemes.formats.integer import IntegerFormat

NAMES = [name for name in quark.formats().names() if not number_format(name).is_cast]
METHODS = (RoundType.half_even, RoundType.round, RoundType.floor)
QSCHEMES: tuple[dict[str, Any], ...] = (
    {"qscheme": "per_tensor"},
    {"qscheme": "per_channel", "ch_axis": 0},
    {"qscheme": "per_group", "ch_axis": -1, "group_size": 32},
)
SCALE_TYPES = ("float", "float32", "float16", "bfloat16", "pof2", None)


def specs_of(name: str) -> Iterator[QTensorConfig]:
    """Every spec of a format that is not refused: methods, granularities, zero points, kinds of scales."""
    for method, qscheme, symmetric, scale_type in product(METHODS, QSCHEMES, (True, False), SCALE_TYPES):
        fields = {"symmetric": symmetric, "scale_type": scale_type, "round_method": method, "is_dynamic": False}
        try:
            spec = QTensorConfig(dtype=name, **qscheme, **fields)
            if quantizer_for(spec, activation=False).shape_error((8, 64)) is None:
                yield spec
        except QuarkError:  # refused by a message about a field
            continue


def weight() -> Tensor:
    """Normal rows of several sizes, and rows whose quotients by powers of two lie halfway between numbers."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-2, 6)[:, None]
    x[5:] = (torch.arange(64) - 31.5) / 4
    return x


def expected(t: np.ndarray, method: RoundType) -> np.ndarray:
    """The kernel of AMD Quark, in float64."""
    if method is RoundType.half_even:
        return np.rint(t)
    return np.floor(t + 0.5) if method is RoundType.round else np.copysign(np.floor(np.abs(t) + 0.5), t)


@pytest.mark.parametrize("name", NAMES)
def test_whatever_the_method_values_have_codes_that_decode_to_them(name: str) -> None:
    x = weight()
    for spec in specs_of(name):
        quantizer = quantizer_for(spec, activation=False)
        refuse_broken(quantizer, activation=False)
        values, qparams = quantizer.round_to_nearest(x)
        assert torch.equal(quantizer.dequantize(quantizer.quantize(x, qparams), qparams), values), spec
        assert torch.equal(quantizer.dequantize(quantizer.codes_of(values, qparams), qparams), values), spec
        assert torch.equal(quantizer.codes_of(values, qparams), quantizer.quantize(x, qparams)) or _has_two_zeros(quantizer), spec


def _has_two_zeros(quantizer: TensorQuantizer) -> bool:
    return not isinstance(quantizer.stored_level.format, IntegerFormat)


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(number_format(name), IntegerFormat)])
def test_methods_of_integers_differ_in_what_becomes_of_halfway_values(name: str) -> None:
    fmt: Any = number_format(name)
    rows = weight().flatten()
    for method in METHODS:
        spec = QTensorConfig(dtype=name, qscheme="per_tensor", symmetric=True, is_dynamic=False, round_method=method)
        wanted = np.clip(expected(rows.double().numpy(), method), fmt.low, fmt.high)
        assert torch.equal(format_of(spec).round_(rows.clone()).double(), torch.from_numpy(wanted)), method
    specs = list(specs_of(name))
    assert {spec.round_method for spec in specs} == set(METHODS)
    assert len(specs) > 90, "no combination is refused but those of scales that the format does not have"


def test_a_number_just_below_a_half_is_not_rounded_up() -> None:
    below = torch.tensor([0.49999997, -0.49999997])
    for method in METHODS:
        spec = QTensorConfig(dtype="int8", qscheme="per_tensor", symmetric=True, is_dynamic=False, round_method=method)
        assert format_of(spec).round_(below.clone()).tolist() == [0, 0]


@pytest.mark.parametrize("name", [name for name in NAMES if not isinstance(number_format(name), IntegerFormat)])
def test_other_formats_round_half_to_even_under_every_method(name: str) -> None:
    by_fields: dict[Any, list[Tensor]] = {}
    for spec in specs_of(name):
        values = quantizer_for(spec, activation=False).fake_quantize(weight())
        by_fields.setdefault(spec.set(round_method=None), []).append(values)
    assert all(torch.equal(one, values[0]) for values in by_fields.values() for one in values)
