"""Every code of every format: decoding and encoding are inverse, rounding goes to the nearest value, ties to even, packing is exact."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import quark
from quark.numerics import NumberFormat, PerChannel, PerGroup, PerTensor, number_format
from quark_schemes.formats.integer import IntegerFormat
from quark_schemes.formats.minifloat import MiniFloat

SCALED = [n for n in quark.formats().names() if not number_format(n).is_cast]
FLOATS = [n for n in SCALED if isinstance(number_format(n), MiniFloat)]
INTEGERS = [n for n in SCALED if isinstance(number_format(n), IntegerFormat)]


def all_values(fmt: NumberFormat) -> Tensor:
    """Every finite value of a format, ascending, without −0."""
    if isinstance(fmt, IntegerFormat):
        return torch.arange(fmt.low, fmt.high + 1).float()
    codes = torch.arange(1 << int(fmt.bits), dtype=torch.uint8)
    values = fmt.decode(codes if fmt.storage_dtype is torch.uint8 else codes.view(fmt.storage_dtype))
    assert isinstance(fmt, MiniFloat)
    return values[values.abs() <= fmt.shape.largest].unique()


def oracle(fmt: MiniFloat) -> Tensor:
    """The values of a small float by its definition, from sign, exponent and mantissa."""
    found = {0.0}
    for exponent in range(1 << fmt.shape.exponent_bits):
        for mantissa in range(1 << fmt.shape.mantissa_bits):
            fraction = mantissa / (1 << fmt.shape.mantissa_bits)
            value = fraction * 2.0 ** (1 - fmt.shape.bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - fmt.shape.bias)
            if value <= fmt.shape.largest:
                found |= {value, -value}
    return torch.tensor(sorted(found))


@pytest.mark.parametrize("name", FLOATS)
def test_decoding_gives_the_values_of_the_definition(name: str) -> None:
    fmt = number_format(name)
    assert isinstance(fmt, MiniFloat)
    assert torch.equal(all_values(fmt), oracle(fmt))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_decoding_agrees_with_torchs_own_dtype(name: str) -> None:
    fmt = number_format(name)
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.storage_dtype)
    theirs = codes.float()
    finite = theirs.isfinite()
    assert torch.equal(fmt.decode(codes)[finite], theirs[finite])


@pytest.mark.parametrize("name", SCALED)
def test_every_value_is_encoded_to_a_code_that_decodes_to_it(name: str) -> None:
    fmt = number_format(name)
    values = all_values(fmt)
    codes = fmt.encode(values.clone())
    assert codes.dtype == fmt.storage_dtype
    assert torch.equal(fmt.decode(codes), values)


@pytest.mark.parametrize("name", SCALED)
def test_between_two_values_the_nearest_wins_and_halfway_the_even_one(name: str) -> None:
    fmt = number_format(name)
    values = all_values(fmt)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2  # exact: neighbours differ by a power of two
    just = torch.finfo(torch.float32).eps * 4
    below, above = middle - middle.abs() * just, middle + middle.abs() * just
    inner = middle != 0
    assert torch.equal(fmt.round_(below.clone())[inner], low[inner])
    assert torch.equal(fmt.round_(above.clone())[inner], high[inner])
    codes_low, codes_high = (fmt.encode(v.clone()).view(torch.uint8).int() for v in (low, high))
    even = torch.where(codes_low % 2 == 0, low, high)
    assert torch.equal(fmt.round_(middle.clone()), even)
    assert ((codes_low % 2 == 0) != (codes_high % 2 == 0)).all(), "neighbours have codes of different parity"


@pytest.mark.parametrize("name", SCALED)
def test_beyond_the_range_values_saturate(name: str) -> None:
    fmt = number_format(name)
    values = all_values(fmt)
    outside = torch.tensor([-1e30, -torch.inf, 1e30, torch.inf])
    assert fmt.round_(outside).tolist() == [values[0], values[0], values[-1], values[-1]]


@pytest.mark.parametrize("name", SCALED)
def test_nan_is_not_hidden_by_rounding(name: str) -> None:
    assert number_format(name).round_(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_keeps_the_sign_of_zero_and_rounds_as_torch_does(name: str) -> None:
    fmt = number_format(name)
    assert isinstance(fmt, MiniFloat)
    g = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(5000, generator=g) * 2.0 ** torch.randint(-20, 8, (5000,), generator=g), torch.tensor([-0.0, -1e-9, 0.0])])
    x = x.clamp(-fmt.shape.largest, fmt.shape.largest)
    ours, theirs = fmt.round_(x.clone()), x.to(fmt.storage_dtype).float()
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert torch.equal(fmt.encode(ours).view(torch.uint8), x.to(fmt.storage_dtype).view(torch.uint8))


@pytest.mark.parametrize("order", ["order", "reorder"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(0), PerGroup(8)], ids=repr)
@pytest.mark.parametrize("name", SCALED)
def test_packing_loses_nothing_and_meta_tensors_know_the_shape(name: str, granularity: object, order: str) -> None:
    fmt = number_format(name)
    values = all_values(fmt)
    g = torch.Generator().manual_seed(1)
    codes = fmt.encode(values[torch.randint(0, len(values), (24, 32), generator=g)])
    packed = fmt.pack(codes, granularity, order)  # type: ignore[arg-type]
    assert torch.equal(fmt.unpack(packed, granularity, order, (24, 32)).view(torch.uint8), codes.view(torch.uint8))  # type: ignore[arg-type]
    shape = fmt.pack(codes.to("meta"), granularity, order)  # type: ignore[arg-type]
    assert (shape.shape, shape.dtype) == (packed.shape, packed.dtype)
    assert packed.numel() * packed.element_size() * 8 == codes.numel() * fmt.bits


@pytest.mark.parametrize("name", SCALED)
@given(data=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30))
def test_rounding_is_monotone_and_idempotent(name: str, data: list[float]) -> None:
    fmt = number_format(name)
    x = torch.tensor(sorted(data), dtype=torch.float32)
    once = fmt.round_(x.clone())
    assert (once.diff() >= 0).all()
    assert torch.equal(fmt.round_(once.clone()), once)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_symmetric_unsigned_format_has_zero_point_0_as_documented(name: str) -> None:
    import attrs

    from quark.specs.tensor import QTensorConfig

    fmt = number_format(name)
    spec = QTensorConfig(dtype=name, qscheme="per_tensor", symmetric=True, is_dynamic=False)
    qparams = fmt.qparams(torch.tensor(-1.0), torch.tensor(3.0), spec)
    assert qparams.zero_point is None
    asymmetric = fmt.qparams(torch.tensor(-1.0), torch.tensor(3.0), attrs.evolve(spec, symmetric=False))
    assert asymmetric.zero_point is not None
    assert asymmetric.zero_point.dtype == torch.int32
