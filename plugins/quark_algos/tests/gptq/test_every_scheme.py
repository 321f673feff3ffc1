"""Columns are rounded to the values of any scheme's grid, with better outputs than round-to-nearest."""

from __future__ import annotations

import pytest
import torch

import quark
from quark.numbers import WeightGrid, quantizer_for
from quark_algos.gptq.damping import factor
from quark_algos.gptq.gptq import ldlq
from quark_algos.gptq.vectors import by_vectors, descending

from . import published
from .problems import damped, setting

SCHEMES = [n for n in quark.schemes().names() if quark.schemes().load_config(n)().weight is not None]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_columns_get_values_of_the_grid_and_outputs_get_better(scheme: str) -> None:
    s = setting(30, K=256, tokens=600)
    wt = torch.cat([s.wt] * 11, 1)[:, :128].float().contiguous()  # rows enough for every block of rows
    wt += 0.01 * torch.randn(wt.shape, generator=torch.Generator().manual_seed(0))
    grid = WeightGrid([quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False)], [128], wt)
    order = descending(s.H.diagonal(), grid.vector)
    each = grid.with_subscales(wt, grid.fixed or grid.scales(wt))
    rounded, found = grid.rounder(each, order), by_vectors(factor(s.H.float(), 0.01, order), grid.vector)
    done = ldlq(wt, found, rounded, order=order)
    runs = done.q[order].unbind(0) if grid.vector == 1 else done.q[order].split(grid.vector)
    again = torch.stack([rounded(t.clone(), k * grid.vector) for k, t in enumerate(runs)]).view(wt.shape)
    torch.testing.assert_close(again, done.q[order], rtol=2**-22, atol=0)
    plain = grid.round_(wt.clone(), each)
    H = damped(s.H, 0.01)
    feedback, nearest = (float(published.objective((wt - q).double().t(), H).sum()) for q in (done.q, plain))
    assert feedback < 0.9 * nearest
