"""The factorisation by panels: `quark_algos.gptq.damping`."""

from __future__ import annotations

import pytest
import torch

from quark_algos.gptq.damping import PANEL, SingularError, damped, factor, shrunk


def positive_definite(columns: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(columns), dtype=torch.float64)
    return (x.t() @ x).to(dtype)


@pytest.mark.parametrize("columns", [1, PANEL - 1, PANEL, PANEL + 1, 3 * PANEL + 7])
def test_factors_multiply_to_the_damped_matrix_however_many_panels_there_are(columns: int) -> None:
    h = positive_definite(columns)
    found = factor(h, 0.01)
    torch.testing.assert_close(found.a * found.pivots @ found.a.t(), damped(h, 0.01), rtol=1e-10, atol=1e-10 * float(h.abs().max()))
    assert torch.equal(found.a, found.a.triu())
    torch.testing.assert_close(found.a.diagonal(), torch.ones(columns, dtype=torch.float64))


def test_what_turns_out_to_be_indefinite_in_a_later_panel_is_damped_more_and_refused_at_last() -> None:
    h = positive_definite(3 * PANEL)
    mean = float(h.diagonal().mean())
    least = float(torch.linalg.eigvalsh(h)[0])
    shifted = h - (least + 1e-4 * mean) * torch.eye(len(h), dtype=h.dtype)  # its least eigenvalue is −1e-4 of the mean diagonal
    assert factor(shifted, 1e-6).attempts > 1
    h[5, 4] = h[4, 5] = 1e9  # the factorisation begins at the last channel
    with pytest.raises(SingularError, match="positive definite"):
        factor(h, 1e-6)


def test_without_damping_a_singular_hessian_is_damped_all_the_same() -> None:
    one = torch.ones(8, 1, dtype=torch.float64)
    found = factor(one @ one.t(), 0.0)
    assert found.attempts > 1
    assert 0 < found.damping < 1e-3
    assert factor(positive_definite(8), 0.0).attempts == 1


def test_a_dead_channel_gets_the_mean_of_the_living_and_costs_no_attempt() -> None:
    h = torch.diag(torch.tensor([2.0, 0.0, 4.0]))
    made = damped(h, 0.5)
    assert made.diagonal().tolist() == [2 + 1.5, 3.0, 4 + 1.5]
    assert factor(h, 0.01).attempts == 1


def test_shrinkage_draws_the_diagonal_to_the_mean_of_the_living_channels() -> None:
    h = torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 4.0]])
    made = shrunk(h, (0.5, 0.5))
    assert made.diagonal().tolist() == [2.5, 0.0, 3.5]
    assert made[0, 2] == made[2, 0] == 0.5
