"""Vectors of columns are rounded together, with feedback after each, to the objective of single columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quark_algos.gptq.damping import damped, factor
from quark_algos.gptq.gptq import ldlq
from quark_algos.gptq.vectors import by_vectors, descending

K, N = 48, 20


def problem() -> tuple[Tensor, Tensor]:
    """Return H and Wᵀ: neighbouring channels are strongly correlated."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.eye(K) + 0.9 * torch.eye(K).roll(1, 0) + 0.3 * torch.randn(K, K, generator=generator) / K**0.5
    x = torch.randn(400, K, generator=generator) @ mixing
    return (x.t() @ x).double(), torch.randn(K, N, generator=generator, dtype=torch.float64)


def whole_numbers(t: Tensor, k: int, out: Tensor | None = None, metric: Tensor | None = None) -> Tensor:
    return torch.round(t, out=t if out is None else out)


def in_metric(t: Tensor, k: int, out: Tensor, metric: Tensor) -> Tensor:
    """The best of all whole vectors within 1 of the nearest."""
    steps = torch.cartesian_prod(*[torch.arange(-1.0, 2.0, dtype=t.dtype)] * len(t))  # [3ᵛ, v]
    candidates = t.round().t()[:, None] + steps  # [N, 3ᵛ, v]
    error = candidates - t.t()[:, None]
    best = torch.einsum("ncv,vw,ncw->nc", error, metric, error).argmin(1)
    return out.copy_(candidates[torch.arange(len(candidates)), best].t())


def objective(wt: Tensor, q: Tensor, h: Tensor) -> Tensor:
    e = (wt - q).t()
    return ((e @ h) * e).sum(1)


def test_the_factor_of_vectors_is_another_one_of_the_same_matrix() -> None:
    h, _ = problem()
    found = by_vectors(factor(h, 0.01), 4)
    assert found.inner is not None
    metric = torch.block_diag(*(c * d @ c.t() for c, d in zip(found.inner, found.pivots.view(-1, 4), strict=True)))
    torch.testing.assert_close(found.a @ metric @ found.a.t(), damped(h, 0.01))
    blocks = torch.diagonal(found.a.view(K // 4, 4, -1, 4), dim1=0, dim2=2).permute(2, 0, 1)
    torch.testing.assert_close(blocks, torch.eye(4, dtype=h.dtype).expand(K // 4, 4, 4))
    assert by_vectors(found, 1) is found


@pytest.mark.parametrize("vector", [2, 4, 8])
@pytest.mark.parametrize("block", [8, 16, 48])
def test_the_loss_is_the_objective(vector: int, block: int) -> None:
    h, wt = problem()
    order = descending(h.diagonal(), vector)
    found = by_vectors(factor(h, 0.01, order), vector)
    done = ldlq(wt, found, whole_numbers, block, order)
    torch.testing.assert_close(done.loss, objective(wt, done.q, damped(h, 0.01)))
    assert torch.equal(done.q, done.q.round())
    other = ldlq(wt, found, whole_numbers, K, order)
    assert torch.equal(done.q, other.q)  # the block is a matter of speed


def test_feedback_beats_the_nearest_vectors_and_the_metric_beats_feedback_alone() -> None:
    h, wt = problem()
    found = by_vectors(factor(h, 0.01), 4)
    nearest, fed, best = (
        float(objective(wt, q, damped(h, 0.01)).sum()) for q in (wt.round(), ldlq(wt, found, whole_numbers).q, ldlq(wt, found, in_metric).q)
    )
    assert fed < 0.9 * nearest
    assert best < 0.9 * fed


def test_whole_vectors_are_ordered() -> None:
    order = descending(torch.tensor([1.0, 2.0, 9.0, 0.0, 3.0, 3.0]), 2)
    assert order.tolist() == [2, 3, 4, 5, 0, 1]
