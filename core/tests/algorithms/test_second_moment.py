"""The share of a Hessian that is sampling noise, estimated from the variance of its entries."""

from __future__ import annotations

import pytest
import torch

from quark.algorithms import Hessian, Hessian64

X = torch.randn(60, 9, generator=torch.Generator().manual_seed(0)) @ torch.randn(9, 9, generator=torch.Generator().manual_seed(1))


def moment_of(*parts: torch.Tensor, kind: type[Hessian] = Hessian) -> Hessian:
    found = kind(parts[0].shape[1], parts[0].device)
    for part in parts:
        found.update(part)
    return found


@pytest.mark.parametrize("kind", [Hessian, Hessian64])
def test_it_is_the_variance_of_the_mean_of_each_entry_in_proportion_to_its_square(kind: type[Hessian]) -> None:
    x = X.double()
    products = x[:, :, None] * x[:, None, :]  # [T, K, K]
    variance = products.var(0) / len(x)  # of the mean
    mean = products.mean(0)
    aside = ~torch.eye(9, dtype=torch.bool)
    along = (mean.diagonal() - mean.diagonal().mean()).square().sum()
    expected = (variance[aside].sum() / mean[aside].square().sum(), variance.diagonal().sum() / along)
    assert all(0 < share < 1 for share in expected)
    torch.testing.assert_close(moment_of(X, kind=kind).shrinkage(), tuple(float(share) for share in expected), rtol=1e-4, atol=0)


def test_batches_merging_and_scale_make_no_difference() -> None:
    whole = moment_of(X).shrinkage()
    merged = moment_of(X[:7])
    merged.merge(moment_of(X[7:]))
    for other in (moment_of(X[:20], X[20:]), merged, moment_of(X * 2**-20)):
        torch.testing.assert_close(other.shrinkage(), whole, rtol=1e-4, atol=0)


def test_it_is_all_of_what_one_token_or_none_or_silence_shows_and_of_what_is_no_number() -> None:
    for hessian in (Hessian(9, X.device), moment_of(X[:1]), moment_of(torch.zeros(5, 9)), moment_of(X * torch.nan)):
        assert hessian.shrinkage() == (1.0, 1.0)


def test_it_is_nothing_where_all_tokens_are_alike() -> None:
    assert max(moment_of(torch.ones(50, 1) * torch.arange(1, 10.0)).shrinkage()) < 1e-5
