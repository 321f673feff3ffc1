"""The grid of rounded weights: neighbours are adjacent, and other scales keep the codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quark
from quark.numbers import RoundedGrid, quantizer_for

ROWS, K = 8, 256
SCHEMES = [
    n
    for n in quark.schemes().names()
    if (weight := quark.schemes().load_config(n)().weight) is not None
    and quantizer_for(weight, activation=False).stored_level.format.vector == 1
]
"""Those whose elements have neighbours."""


def rounded(scheme: str) -> tuple[Tensor, Tensor, RoundedGrid]:
    """Return a weight and its rounded values, both ``[K, N]``, and their grid."""
    weight = torch.randn(2 * ROWS, K, generator=torch.Generator().manual_seed(0)) * 0.05
    quantizer = quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False)
    parts = [quantizer.round_to_nearest(part) for part in weight.split(ROWS)]
    qt = torch.cat([values for values, _ in parts]).t().contiguous()
    grid = RoundedGrid([quantizer, quantizer], [ROWS, ROWS], qt, [qparams for _, qparams in parts])
    return weight.t().contiguous(), qt, grid


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "int4_fp8"])
def test_a_neighbour_is_the_next_value_on_the_way(scheme: str) -> None:
    wt, qt, grid = rounded(scheme)
    other = grid.neighbours(qt, wt)
    moved = other != qt
    assert moved.float().mean() > 0.5
    assert bool(((other - qt) * (wt - qt) >= 0).all())
    tolerance = 2**-20 * qt.abs().max()
    each = grid.with_subscales(qt, grid.current)
    for share in (0.0, 0.3, 0.7, 1.0):  # between the two there is no other value
        between = grid.round_(torch.lerp(qt, other, share), each)
        assert bool((torch.minimum((between - qt).abs(), (between - other).abs()) <= tolerance).all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_scales_are_those_that_the_layers_have(scheme: str) -> None:
    _, qt, grid = rounded(scheme)
    again = grid.weights(qt, grid.current)
    quantizer = quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False)
    for (values, qparams, _), own in zip(again, qt.split(ROWS, 1), strict=True):
        torch.testing.assert_close(values, own.t(), rtol=2**-20, atol=0)
        expected = quantizer.dequantize(quantizer.codes_of(own.t().contiguous(), qparams), qparams)
        torch.testing.assert_close(values, expected, rtol=2**-20, atol=0)


@pytest.mark.parametrize("scheme", ["int4_wo_64", "uint4_wo_64", "nvfp4", "mxfp4", "int8"])
def test_other_scales_keep_codes_and_zero_points(scheme: str) -> None:
    _, qt, grid = rounded(scheme)
    if not grid.can_be_rescaled:
        assert grid.fixed is not None  # one scale for the whole tensor
        return
    same = grid.rescaled(torch.ones_like(grid.current.scale))
    torch.testing.assert_close(same.scale, grid.current.scale, rtol=2**-20, atol=0)
    half = grid.rescaled(torch.full_like(grid.current.scale, 0.5))
    torch.testing.assert_close(half.scale, grid.current.scale / 2, rtol=2**-20, atol=0)
    if half.zero is not None:
        assert torch.equal(half.zero, grid.current.zero)
    torch.testing.assert_close(grid.round_(qt / 2, half), qt / 2, rtol=2**-20, atol=0)
