"""Comparisons of errors on the same tokens: harm, its significance, and comparisons without tokens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quark.algorithms import OutputError, Validation, validated
from quark.algorithms.validation import channel_factors


def error(squares: list[float], sizes: list[float]) -> OutputError:
    return OutputError(torch.tensor(squares), torch.tensor(sizes))


def test_a_token_of_enormous_size_does_not_hide_the_errors_of_others() -> None:
    wanted = torch.ones(4, 8)
    wanted[0] = 1000.0
    found = wanted.clone()
    found[1:] += 0.5
    assert OutputError.of(found, wanted).relative.tolist() == pytest.approx([0, 0.25, 0.25, 0.25])


@pytest.mark.parametrize("parts", list(itertools.product([True, False], repeat=2)))
def test_errors_together_are_held_out_if_each_of_them_is(parts: tuple[bool, bool]) -> None:
    output, reference = torch.zeros(3, 4), torch.ones(3, 4)
    both = OutputError.joined([OutputError.of(output, reference, is_held_out=part) for part in parts])
    assert both.is_held_out is (parts == (True, True))
    assert both.tokens == 6


def test_a_channel_of_enormous_size_does_not_hide_the_errors_of_others() -> None:
    wanted = torch.ones(64, 8)
    wanted[:, 0] = 1e4
    near, far = wanted.clone(), wanted.clone()
    near[:, 0] *= 1.001
    far[:, 1:] += 0.9
    channels = channel_factors([wanted])
    assert (OutputError.of(near, wanted).relative > OutputError.of(far, wanted).relative).all()
    assert (OutputError.of(near, wanted, channels=channels).relative < OutputError.of(far, wanted, channels=channels).relative).all()


@given(size=st.floats(0.02, 100), cut=st.integers(1, 15), seed=st.integers(0, 100))
def test_the_factor_of_a_channel_falls_with_the_root_of_its_size_in_all_references(size: float, cut: int, seed: int) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    plain, scaled = channel_factors([x]), channel_factors([y := x * torch.tensor([1.0, size, 1.0, 1.0]), y])
    torch.testing.assert_close(channel_factors([x[:cut], x[cut:]]), plain)
    torch.testing.assert_close(scaled[1] / scaled[0], plain[1] / plain[0] / size**0.5)


def test_a_channel_that_is_always_0_has_a_factor_too() -> None:
    dead = torch.ones(4, 8)
    dead[:, 5] = 0
    factors = channel_factors([dead])
    assert torch.isfinite(factors).all()
    assert torch.isfinite(channel_factors([torch.zeros(4, 8)])).all()
    assert float(factors[5] / factors[0]) < 100


def test_the_standard_error_is_that_of_the_mean_of_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.rand(64, generator=generator) for _ in range(2))
    found = validated([OutputError(one, torch.ones(64))], [OutputError(other, torch.ones(64))])
    assert found.standard_error == pytest.approx(float((other - one).double().std()) / 8)


@given(st.permutations(range(8)))
def test_the_order_of_tokens_makes_no_difference(order: list[int]) -> None:
    one, other, sizes = (torch.rand(8, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def compared(index: Tensor) -> Validation:
        return validated([OutputError(one[index], sizes[index])], [OutputError(other[index], sizes[index])])

    expected, found = compared(torch.arange(8)), compared(torch.tensor(order))
    assert (found.after - found.before, found.standard_error) == pytest.approx(
        (expected.after - expected.before, expected.standard_error), rel=1e-12
    )


def test_what_is_within_one_standard_error_is_no_improvement() -> None:
    assert not Validation(1.0, 0.9, 0.2, 9, is_held_out=True).is_improvement
    assert Validation(1.0, 0.7, 0.2, 9, is_held_out=True).is_improvement
    assert not Validation(1.0, 1.5, 0.2, 9, is_held_out=True).is_improvement


def test_the_same_error_everywhere_is_no_improvement() -> None:
    one = error([1, 2, 3], [2, 2, 4])
    assert not validated([one], [one]).is_improvement


def test_what_is_not_a_number_is_no_improvement_and_is_reported_as_none() -> None:
    good, bad = error([1, 2], [2, 2]), error([math.nan, 2], [2, 2])
    for before, after in ((good, bad), (bad, good), (bad, bad), (good, error([math.inf, 1], [2, 2]))):
        found = validated([before], [after])
        assert not found.is_improvement
        assert None in found.metrics().values()


def test_without_tokens_nothing_is_said() -> None:
    found = validated([error([], [])], [error([], [])])
    assert (found.tokens, found.is_improvement, found.metrics()["error_after"], found.metrics()["held_out"]) == (0, False, None, False)


def test_of_one_token_no_standard_error_can_be_told_and_nothing_is_an_improvement() -> None:
    assert not validated([error([2], [2])], [error([1], [2])]).is_improvement


def test_of_blocks_the_mean_is_taken_token_by_token() -> None:
    """If two blocks exchange errors token by token, the mean is unchanged and its standard error is 0."""
    one, other = error([1, 2, 3], [1, 1, 1]), error([3, 2, 1], [1, 1, 1])
    found = validated([one, other], [other, one])
    assert (found.after - found.before, found.standard_error) == pytest.approx((0, 0))


def test_blocks_of_an_encoder_and_of_its_decoder_count_with_their_own_tokens() -> None:
    encoder, decoder = error([4.0, 2.0], [1.0, 1.0]), error([1.0, 1.0, 4.0], [1.0, 1.0, 1.0])
    other = error([2.0, 2.0], [1.0, 1.0])
    found = validated([encoder, other, decoder], [encoder, other, decoder])
    assert found.tokens == 5
    assert found.before == pytest.approx((3 + 2 + 1 + 1 + 4) / 5)
