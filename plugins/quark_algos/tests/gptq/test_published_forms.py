"""The one solver gives the codes of the algorithms as they were published: float64, to the last code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quark
from quark.algorithms import CrossMoment, HeldOut, Hessian64, RoundingTask, Statistic
from quark.config.enums import Dtype
from quark.config.tensor import QTensorConfig
from quark.models.layers import quantized_class
from quark_algos.gptq.config import GPTAQConfig
from quark_algos.gptq.correction import causal_matrix, correction, share_for
from quark_algos.gptq.damping import Factor, factor
from quark_algos.gptq.gptq import ColumnRounding, ldlq, ldlq_choosing

from . import published
from .problems import damped, grid_for, grouped, setting

INT4 = grouped(Dtype.int4, 16)
SPECS = {
    "int4": INT4,
    "uint4": grouped(Dtype.uint4, 16, symmetric=False),
    "int3 in one group": grouped(Dtype.int3, 96),
}


def corrected(wt: Tensor, d: Tensor, found: Factor, alpha: float) -> Tensor:
    """The corrected weight ``Wᵀ + α (H + λ I)⁻¹ Dᵀ Wᵀ``."""
    return wt + correction(wt, d, found).mul_(alpha)


def together(q: Tensor, expected: Tensor) -> None:
    """Require equal codes: grids are coarse, so values that agree to a millionth have the same code."""
    torch.testing.assert_close(q.t(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("by_loudness", [False, True])
@pytest.mark.parametrize("share", [1e-6, 0.01, 1.0])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_codes_are_those_of_gptq_in_three_steps(spec: QTensorConfig, share: float, by_loudness: bool) -> None:
    s = setting(1)
    order = torch.argsort(s.H.diagonal(), descending=True) if by_loudness else torch.arange(96)
    grid, scales = grid_for(spec, s.wt)
    rounded = grid.rounder(scales, order)
    q = ldlq(s.wt, factor(s.H, share, order), rounded, block=40, order=order).q
    expected = torch.empty_like(s.W)
    expected[:, order] = published.gptq(s.W[:, order], damped(s.H, share)[order][:, order], rounded, block=32)
    together(q, expected)
    assert not torch.equal(q, grid.round_(s.wt.clone(), scales))  # which feedback changes


def test_scales_chosen_on_the_way_are_those_of_what_gptq_has_made_of_the_group() -> None:
    s = setting(2)
    grid, _ = grid_for(INT4, s.wt)
    done, scales = ldlq_choosing(s.wt, factor(s.H, 0.01), grid, lambda t, _: grid.scales(t))
    spread = scales.expanded(grid.group)
    seen: dict[int, Tensor] = {}

    def nearest(w: Tensor, k: int) -> Tensor:
        seen[k] = w.clone()
        return grid.round_(w, spread.at(k))

    # With lazy blocks of one group the columns are as fresh when the group begins.
    together(done.q, published.gptq(s.W, damped(s.H, 0.01), nearest, block=16))
    first = grid.scales(s.wt[:16])
    assert torch.equal(scales.scale[0], first.scale[0])
    assert not torch.equal(scales.scale[1:], grid.scales(s.wt).scale[1:])


def test_the_corrected_weight_is_the_minimum_of_the_damped_least_squares() -> None:
    s, share = setting(3), 0.01
    damping = share * float(s.H.diagonal().mean())
    best = corrected(s.wt, s.D, factor(s.H, share), 1.0).t()
    # The gradient of ‖W X − V X̃‖² + λ ‖W − V‖² at V, over −2, in moments: W (H + D) − V H + λ (W − V).
    gradient = s.W @ (s.H + s.D) - best @ s.H + damping * (s.W - best)
    assert gradient.abs().max() < 1e-10 * (s.W @ s.H).abs().max()
    part = corrected(s.wt, s.D, factor(s.H, share), 0.25).t()
    torch.testing.assert_close(part - s.W, (best - s.W) / 4)


@pytest.mark.parametrize("rows", [5, 400], ids=["fewer rows than channels", "more"])
def test_the_correction_is_the_same_by_a_factor_of_any_order(rows: int) -> None:
    s = setting(3)
    wt = torch.randn(len(s.H), rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    perm = torch.argsort(s.H.diagonal(), descending=True)
    expected = torch.linalg.solve(damped(s.H, 0.01), s.D.t() @ wt)
    torch.testing.assert_close(correction(wt, s.D, factor(s.H, 0.01, perm), perm), expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(correction(wt, s.D, factor(s.H, 0.01)), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("seed", [4, 5])
def test_gptq_on_the_corrected_weight_is_qronos_once_the_first_column_is_shared(seed: int) -> None:
    s = setting(seed, K=32)
    H = damped(s.H, 0.01)
    grid, scales = grid_for(grouped(Dtype.int4, 16), s.wt)
    rounded = grid.rounder(scales)
    expected = published.qronos(s.W, H, s.D, rounded)
    found = factor(s.H, 0.01)
    shared = ldlq(
        corrected(s.wt, s.D, found, 1.0), found, lambda t, k, out: rounded(t, k, out) if k else out.copy_(expected[:, 0]), block=10
    )
    together(shared.q, expected)
    assert not torch.allclose(expected, published.gptq(s.W, H, rounded))


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_where_only_the_first_channel_deviates_the_corrected_weight_gives_gptaq(alpha: float) -> None:
    s = setting(6, K=48)
    D = torch.zeros_like(s.D)
    D[0] = 20 * s.D[0]  # strong enough to change codes
    grid, scales = grid_for(grouped(Dtype.int4, 16), s.wt)
    rounded = grid.rounder(scales)
    expected = published.gptaq(s.W, damped(s.H, 0.01), D, alpha, rounded, block=20)
    found = factor(s.H, 0.01)
    shared = ldlq(
        corrected(s.wt, D, found, alpha), found, lambda t, k, out: rounded(t, k, out) if k else out.copy_(expected[:, 0]), block=20
    )
    together(shared.q, expected)
    assert not torch.allclose(expected, published.gptq(s.W, damped(s.H, 0.01), rounded))


@pytest.mark.parametrize("alpha", [0.25, 1.0])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("seed", [8, 9])
def test_the_causal_correction_gives_gptaq(seed: int, act_order: bool, alpha: float) -> None:
    s = setting(seed)
    order = torch.argsort(s.H.diagonal(), descending=True) if act_order else torch.arange(96)
    grid, scales = grid_for(grouped(Dtype.int4, 16), s.wt)
    H, D = (x[order][:, order] for x in (damped(s.H, 0.01), s.D))
    rounded = grid.rounder(scales, order)
    expected = torch.zeros_like(s.W)
    expected[:, order] = published.gptaq(s.W[:, order], H, D, alpha, rounded, block=20)
    found = factor(s.H, 0.01, order)
    done = ldlq(s.wt, found, rounded, block=32, order=order, causal=causal_matrix(D, found, alpha))
    together(done.q, expected)
    torch.testing.assert_close(done.loss, published.objective(done.e.t(), H))
    assert not torch.allclose(expected, published.gptq(s.W, damped(s.H, 0.01), grid.rounder(scales)))


def test_the_preset_reference_of_gptaq_is_what_was_published() -> None:
    s = setting(10)
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(0)) @ s.H.float() / s.H.diagonal().mean()
    seen = x + 0.1 * torch.randn(300, 96, generator=torch.Generator().manual_seed(1))
    moments: dict[type[Statistic], Statistic] = {Hessian64: Hessian64(96, x.device), CrossMoment: CrossMoment(96, x.device)}
    for hessian in moments.values():
        hessian.update(seen, x)
    layer = nn.Linear(96, 12, bias=False)
    layer.weight.data = s.W.float()
    made = quantized_class(layer).from_float(layer, quark.schemes().load_config("int4_wo_32")())
    settings = GPTAQConfig(preset="reference", desc_act=False, static_groups=True, float64=True)
    ColumnRounding(settings).round(RoundingTask({"layer": made}, moments))
    H, D = seen.double().t() @ seen.double(), (x - seen).double().t() @ seen.double()
    grid, scales = grid_for(quark.schemes().load_config("int4_wo_32")().weight, s.wt.float())
    expected = published.gptaq(s.W, damped(H, settings.damp_percent), D, settings.alpha, grid.rounder(scales))
    assert (made.weight.detach().double() - expected).abs().gt(1e-4).double().mean() < 0.01  # float32 here: a tie, and what follows it
    without = published.gptq(s.W, damped(H, settings.damp_percent), grid.rounder(scales))
    assert (without - expected).abs().gt(1e-4).double().mean() > 0.05


def test_the_share_of_a_correction_is_the_best_of_other_tokens() -> None:
    s = setting(11)
    g = torch.Generator().manual_seed(0)
    x, reference = (torch.randn(40, 96, generator=g) for _ in range(2))
    wt, held_out = s.wt.float(), HeldOut(x, x + 0.3 * reference)
    noise = torch.randn(wt.shape, generator=g)
    step = 0.2 * torch.linalg.pinv(x) @ reference @ wt + 0.01 * noise  # the first alone has its best share at 1.5

    def error(share: float) -> float:
        return float(held_out.squared_error((wt + share * step).t(), held_out.outputs(wt.t())).double().sum())

    best = share_for(wt, step, held_out, 10.0)
    assert 0 < best < 10
    assert error(best) < min(error(best * 0.99), error(best * 1.01))
    assert share_for(wt, step, held_out, best / 2) == best / 2
    assert share_for(wt, -step, held_out, 1.0) == 0, "what does harm is left out"


def test_completing_the_square_holds_for_any_rounding() -> None:
    s, share = setting(7), 0.01
    damping = share * float(s.H.diagonal().mean())
    H, best = damped(s.H, share), corrected(s.wt, s.D, factor(s.H, share), 1.0).t()
    grid, scales = grid_for(INT4, s.wt)
    constants = []
    for shift in (0.0, 0.01, -0.02):
        Q = grid.round_(s.wt + shift, scales).t()
        # ‖W X − Q X̃‖² without the term of X alone, in moments, and λ ‖W − Q‖².
        asked = published.objective(Q, s.H) - 2 * ((s.W @ (s.H + s.D)) * Q).sum(1) + damping * (s.W - Q).square().sum(1)
        constants.append(asked - published.objective(best - Q, H))
    torch.testing.assert_close(constants[1], constants[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(constants[2], constants[0], rtol=1e-9, atol=0)
