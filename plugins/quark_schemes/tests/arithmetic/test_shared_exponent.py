"""Shared exponents of MX blocks, by the worked examples of the reference, and their bytes."""

import pytest
import torch

from quark.errors import ConfigError
from quark_schemes.arithmetic.shared_exponent import decode_e8m0, encode_e8m0, power_of_two, shared_exponent_scale

EXAMPLES = [
    (1.0, 0.25, 0.25, 0.25),
    (1.75, 0.5, 0.25, 0.5),
    (2.0, 0.5, 0.5, 0.5),
    (3.4, 0.5, 0.5, 1.0),
    (3.5, 1.0, 0.5, 1.0),
    (5.0, 1.0, 1.0, 2.0),
    (7.0, 2.0, 1.0, 2.0),
    (8.0, 2.0, 2.0, 2.0),
    (448.0, 128.0, 64.0, 128.0),
]


@pytest.mark.parametrize(("amax", "even", "floor", "ceil"), EXAMPLES)
def test_the_scale_of_fp4_blocks_in_each_mode(amax: float, even: float, floor: float, ceil: float) -> None:
    found = [float(shared_exponent_scale(torch.tensor([amax]), mode, 1, 2)) for mode in ("even", "floor", "ceil")]
    assert found == [even, floor, ceil]


@pytest.mark.parametrize(("mantissa_bits", "largest_exponent", "largest"), [(1, 2, 6.0), (3, 8, 448.0), (2, 4, 28.0), (3, 2, 7.5)])
def test_rceil_is_the_smallest_power_of_two_with_which_nothing_saturates(mantissa_bits: int, largest_exponent: int, largest: float) -> None:
    amax = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 100 + 1e-3
    amax[:3] = torch.tensor([largest, 2 * largest, largest / 4])
    scale = shared_exponent_scale(amax, "rceil", mantissa_bits, largest_exponent, largest)
    assert (amax / scale <= largest).all()
    assert (amax / (scale / 2) > largest).all()
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))


def test_an_empty_block_gets_the_smallest_normal_scale_and_a_broken_one_stays_visible() -> None:
    found = shared_exponent_scale(torch.tensor([0.0, torch.inf, torch.nan]), "even", 1, 2)
    assert found[0] == 2.0**-126
    assert not found[1:].isfinite().any()


def test_tiny_blocks_end_at_the_smallest_exponent() -> None:
    assert shared_exponent_scale(torch.tensor([1e-44]), "even", 1, 2).item() == 2.0**-127


def test_every_byte_but_nan_is_a_power_of_two_and_comes_back() -> None:
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scale = decode_e8m0(data)
    assert scale[255].isnan()
    assert torch.equal(scale[:255].double(), 2.0 ** (torch.arange(255).double() - 127))
    assert torch.equal(encode_e8m0(scale), data)


def test_powers_of_two_are_exact() -> None:
    exponent = torch.arange(-127, 128, dtype=torch.int32)
    assert torch.equal(power_of_two(exponent).double(), 2.0 ** exponent.double())


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of even, floor, ceil, rceil"):
        shared_exponent_scale(torch.ones(1), "up", 1, 2)
