"""Searches of scales.

Closed forms equal the errors they stand for, no choice is worse than none, in every format.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import quark
from quark.config.layer import TensorSpec
from quark.numbers import WeightGrid, quantizer_for
from quark_algos.equalization.candidates import RANK, Quadratic, by_activations, by_both, relative_weights
from quark_algos.equalization.inputs import ChannelRanges, rounding_of_inputs
from quark_algos.equalization.search import AWQ_RATIOS, ActivationErrors, Part, autosmooth, awq
from quark_algos.equalization.smoothquant import smoothquant
from quark_algos.mappings.resolve import Channels

INT4_BY_32: TensorSpec = quark.schemes().load_config("int4_wo_32")().weight
INT8 = quark.schemes().load_config("int8")()
SCHEMES = [n for n in quark.schemes().names() if quark.schemes().load_config(n)().weight is not None]
K, N, T = 2 * RANK, 96, 700  # so few channels that losses are exact


def inputs(seed: int = 0, columns: int = K) -> Tensor:
    """``[T, K]``, float64.

    Some channels are a hundred times as act_order as most, and all have something in common.
    """
    g = torch.Generator().manual_seed(seed)
    act_order = torch.rand(columns, generator=g, dtype=torch.float64).pow(8) * 100 + 0.3
    common = torch.randn(T, 8, generator=g, dtype=torch.float64) @ torch.randn(8, columns, generator=g, dtype=torch.float64)
    return (torch.randn(T, columns, generator=g, dtype=torch.float64) + 0.3 * common) * act_order


def weight(seed: int = 1, columns: int = K) -> Tensor:
    """Wᵀ ``[K, N]``, float64."""
    return torch.randn(columns, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.05


def grid_of(spec: TensorSpec) -> Callable[[Tensor], WeightGrid]:
    return lambda wt: WeightGrid([quantizer_for(spec, activation=False)], [wt.shape[1]], wt)


def part(spec: TensorSpec, x: Tensor, wt: Tensor) -> Part:
    return Part(wt.float(), Quadratic((x.t() @ x).float()), grid_of(spec), tokens=len(x))


def inputs_of(x: Tensor, sample: Tensor | None = None) -> ActivationErrors:
    """Of int8 with one static scale."""
    return ActivationErrors(
        (x if sample is None else sample).float(), torch.stack((x.amin(0), x.amax(0))).float(), rounding_of_inputs(INT8)
    )


def mean_of(x: Tensor) -> Tensor:
    return x.abs().mean(0).float()


def max_of(x: Tensor) -> Tensor:
    return x.abs().amax(0).float()


def test_the_loss_by_the_second_moment_is_that_of_the_outputs() -> None:
    x, wt = inputs(), weight()
    s = by_activations(mean_of(x), torch.tensor([0.5]))[0]
    delta = part(INT4_BY_32, x, wt).error(s).double()
    quadratic = Quadratic(x.t() @ x)
    rows = (x @ delta).square().sum(0)
    torch.testing.assert_close(quadratic.rows(delta), rows, rtol=1e-10, atol=0)
    assert math.isclose(float(quadratic.rows(delta).sum()), float((x @ (wt + delta) - x @ wt).square().mean()) * N * T, rel_tol=1e-10)


def test_a_screening_is_near_the_loss_and_ranks_scales_alike() -> None:
    x, wt = inputs(columns=8 * RANK), weight(columns=8 * RANK)
    found = part(INT4_BY_32, x, wt)
    errors = [found.error(s) for s in by_activations(mean_of(x), torch.linspace(0, 1, 11))]
    exact = torch.stack([(x @ error.double()).square().sum() for error in errors])
    nearly = torch.stack([found.quadratic.rows(error).sum().double() for error in errors])
    torch.testing.assert_close(nearly, exact, rtol=0.03, atol=0)
    assert exact[nearly.argmin()] <= 1.01 * exact.min()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_a_screening_of_a_moment_of_low_rank_is_exact(rank: int, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(rank, 4 * RANK, generator=torch.Generator().manual_seed(0), dtype=dtype)
    quadratic, delta = Quadratic(x.t() @ x), weight(columns=4 * RANK).to(dtype)
    torch.testing.assert_close(quadratic.rows(delta).sum(), (x @ delta).square().sum(), rtol=tolerance, atol=1e-12)


def test_awq_protects_loud_channels_and_tells_the_exact_error() -> None:
    x, wt = inputs(), weight()
    found = part(INT4_BY_32, x, wt)
    choice = awq([found], mean_of(x))
    assert choice.loss < 0.8 * choice.plain
    for s, loss in ((choice.scale, choice.loss), (torch.ones(K), choice.plain)):
        assert math.isclose(loss, float((x @ found.error(s).double()).square().sum()), rel_tol=1e-4)


def test_of_many_channels_the_loss_of_a_choice_is_nearly_that_of_the_outputs() -> None:
    x, wt = inputs(columns=8 * RANK), weight(columns=8 * RANK)
    found = part(INT4_BY_32, x, wt)
    choice = awq([found], mean_of(x))
    real, plain = (float((x @ found.error(s).double()).square().sum()) for s in (choice.scale, torch.ones(8 * RANK)))
    assert real < plain
    assert math.isclose(choice.loss, real, rel_tol=0.03)
    assert math.isclose(choice.plain, plain, rel_tol=0.03)


def test_the_short_search_finds_what_the_long_one_does_or_nearly() -> None:
    for seed in range(4):
        x, wt = inputs(seed), weight(seed + 10)
        short, long = (awq([part(INT4_BY_32, x, wt)], mean_of(x), exhaustive=e) for e in (False, True))
        assert int(short.tried.isfinite().sum()) <= 16 < int(long.tried.isfinite().sum()) == 2 * len(AWQ_RATIOS)
        assert short.loss <= 1.05 * long.loss
        tried = short.tried.nan_to_num(torch.inf)
        form, best = divmod(int(tried.argmin()), len(AWQ_RATIOS))
        assert tried[form, max(best - 1, 0) : best + 2].isfinite().all()  # no ratio beside the best is left out


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_choice_is_worse_than_no_scaling_in_any_format(scheme: str) -> None:
    spec = quark.schemes().load_config(scheme)().weight
    x, wt = inputs(), weight()
    found = part(spec, x, wt)
    sample = inputs_of(x, x[:64])
    for choice in (awq([found], mean_of(x), ratios=AWQ_RATIOS[::5]), autosmooth([found], max_of(x), [sample], ratios=(0.0, 0.5, 1.0))):
        assert torch.isfinite(choice.scale).all()
        assert (choice.scale > 0).all()
        assert choice.loss <= choice.plain
    assert found.error(choice.scale).isfinite().all()


def test_where_no_scaling_is_best_none_is_chosen() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(T, 64, generator=g, dtype=torch.float64) * torch.logspace(-2, 2, 64, dtype=torch.float64)
    wt = torch.randn(64, N, generator=g).sign() * 6  # every weight is a value of the grid, before scaling
    for ratios in (AWQ_RATIOS, (0.5, 0.75)):  # whether it is among the ratios or not
        choice = awq([part(quark.schemes().load_config("mxfp4")().weight, x, wt)], mean_of(x), ratios=ratios)
        assert torch.equal(choice.scale, torch.ones(64))
        assert choice.loss == choice.plain == 0


def test_parts_are_judged_together_each_by_its_own_tokens() -> None:
    wt, xs = weight(), (inputs(3), inputs(4))
    parts = [part(INT4_BY_32, x, wt) for x in xs]
    choice = awq(parts, mean_of(torch.cat(xs)))
    apart = sum(float(p.quadratic.rows(p.error(choice.scale)).sum()) for p in parts)
    assert math.isclose(choice.loss, apart, rel_tol=1e-6)
    assert choice.loss < choice.plain


def test_columns_that_share_a_channel_get_one_scale() -> None:
    channels = Channels(32, repeats=4, size=16)
    x = inputs()
    choice = awq([part(INT4_BY_32, x, weight())], mean_of(x), channels=channels)
    assert choice.scale.shape == (32,)
    assert choice.loss < choice.plain
    found = part(INT4_BY_32, x, weight())
    assert math.isclose(choice.loss, float(found.quadratic.rows(found.error(channels.expand_scale(choice.scale))).sum()), rel_tol=1e-6)


@pytest.mark.parametrize("loss", ["MSE", "RMSE", "MAE"])
def test_autosmooth_judges_the_outputs_of_rounded_weights_and_rounded_inputs(loss: str) -> None:
    x, wt = inputs(), weight()
    found, activations = part(INT8.weight, x, wt), inputs_of(x)
    choice = autosmooth([found], max_of(x), [activations], loss=loss)
    assert choice.loss < 0.7 * choice.plain

    def error_of(s: Tensor) -> Tensor:
        rounded = x + activations.error(s).double()
        return rounded @ (wt + found.error(s).double()) - x @ wt

    for s, said in ((choice.scale, choice.loss), (torch.ones(K), choice.plain)):
        of_weights, of_inputs = x @ found.error(s).double(), activations.error(s).double() @ wt
        rows = of_weights.square().sum(0) + of_inputs.square().sum(0)
        assert math.isclose(said, float(rows.sqrt().sum() if loss == "MAE" else rows.sum()), rel_tol=1e-4)
        rows = error_of(s).square().sum(0)
        outputs = float(rows.sqrt().sum() if loss == "MAE" else rows.sum())
        assert math.isclose(said, outputs, rel_tol=0.1)  # but for what the two errors have in common
    if loss == "MAE":
        said, real = choice.loss / choice.plain, float(error_of(choice.scale).abs().sum() / error_of(torch.ones(K)).abs().sum())
        assert math.isclose(said, real, rel_tol=0.1)


def test_awq_counts_the_errors_of_inputs_that_are_rounded_too() -> None:
    x, wt = inputs(), weight()
    found, activations = part(INT8.weight, x, wt), inputs_of(x)
    by_weights, by_both_errors = awq([found], mean_of(x)), awq([found], mean_of(x), [activations])

    def error_of(s: Tensor) -> float:
        rounded = x + activations.error(s).double()
        return float((rounded @ (wt + found.error(s).double()) - x @ wt).square().sum())

    assert error_of(by_both_errors.scale) < 0.95 * error_of(by_weights.scale)
    assert math.isclose(by_both_errors.loss, error_of(by_both_errors.scale), rel_tol=0.1)


@pytest.mark.parametrize("loss", ["MSE", "MAE"])
def test_errors_of_a_sample_of_inputs_stand_for_those_of_all_tokens(loss: str) -> None:
    x, wt = inputs(), weight()
    of_all, of_some = (autosmooth([part(INT8.weight, x, wt)], max_of(x), [inputs_of(x, x[::every])], loss=loss) for every in (1, 4))
    assert math.isclose(of_some.plain, of_all.plain, rel_tol=0.1)  # errors of rounding: independent, so that 175 tokens give their mean


def test_the_scales_of_smoothquant_are_those_published() -> None:
    x_max, w_max = torch.tensor([16.0, 2.0, 0.0, 4.0, torch.inf, 1e-9]), torch.tensor([1.0, 8.0, 3.0, 0.0, 1.0, 4.0])
    s = smoothquant(x_max, w_max, 0.5, 1e-3)
    torch.testing.assert_close(s, torch.tensor([4.0, 0.5, 1.0, 1.0, 1.0, 1e-3]))
    assert smoothquant(x_max, w_max, 1.0, 1e-3)[:2].tolist() == [16.0, 2.0]
    balanced = smoothquant(x_max[:2], w_max[:2], 0.5, 1e-3)
    torch.testing.assert_close(x_max[:2] / balanced, w_max[:2] * balanced)


def test_candidates_are_centred_around_1_and_leave_dead_channels_alone() -> None:
    x, w, ratios = torch.tensor([100.0, 0.0, 1.0, 0.01]), torch.tensor([1.0, 1.0, 0.5, 0.25]), torch.tensor([0.0, 0.25, 0.5, 1.0])
    plain = by_activations(x, ratios[[0, 2, 3]])
    torch.testing.assert_close(plain, torch.tensor([[1.0, 1, 1, 1], [10, 1, 1, 0.1], [100, 1, 1, 0.01]]))
    both = by_both(x, w, ratios)
    assert (both[:, 1] == 1).all()
    live = both[:, [0, 2, 3]]
    torch.testing.assert_close(live.amax(1) * live.amin(1), torch.ones(len(ratios)))
    # x^r / w^(1-r): the weights alone at r = 0, the inputs alone at r = 1, and in between neither share is
    # the other's.
    for r, found in zip(ratios.tolist(), both, strict=True):
        expected = 10000**r / 4 ** (1 - r)
        torch.testing.assert_close(found[0] / found[3], torch.tensor(expected), rtol=1e-3, atol=0)


def test_weights_are_measured_by_the_largest_of_their_group() -> None:
    wt = torch.tensor([[1.0, 4.0], [-2.0, 1.0], [0.0, 0.0], [0.0, 3.0]])
    assert relative_weights(wt, 2).tolist() == [0.75, 0.625, 0.0, 0.5]


def test_static_ranges_are_those_of_all_tokens_not_of_the_sample() -> None:
    x = inputs()
    x[T - 1, 5] = 40 * x.abs().max()  # seen by none of the sample
    sample, s = x[:64].float(), torch.linspace(0.5, 2, K)
    quantizer = quantizer_for(INT8.input_tensors, activation=True)
    step = float((x.float() / s).abs().max()) / 127.5
    got = sample + inputs_of(x, sample).error(s)
    torch.testing.assert_close(got / s / step, (got / s / step).round(), rtol=0, atol=1e-2)
    assert not torch.allclose(got, quantizer.fake_quantize(sample / s) * s)


def test_of_parts_with_inputs_of_their_own_each_is_judged_by_its_own_sample() -> None:
    """The second part's inputs are act_order where the first's are not.

    What the first's sample says of them is wrong by far.
    """
    wt, quiet = weight(), inputs(3)
    act_order = quiet.clone()
    act_order[:, :8] *= 100
    parts = [part(INT8.weight, x, wt) for x in (quiet, act_order)]
    x_max = torch.maximum(max_of(quiet), max_of(act_order))
    choice = autosmooth(parts, x_max, [inputs_of(quiet), inputs_of(act_order)])
    real = 0.0
    for x, found in zip((quiet, act_order), parts, strict=True):
        s = choice.scale
        rounded = x + inputs_of(x).error(s).double()
        real += float((rounded @ (wt + found.error(s).double()) - x @ wt).square().sum())
    assert math.isclose(choice.loss, real, rel_tol=0.1)  # but for what the errors of weights and of inputs have in common


def test_ranges_of_channels_can_be_merged() -> None:
    x = inputs().float()
    whole, parts = (ChannelRanges(K, x.device) for _ in range(2))
    whole.update(x)
    for piece in x.split(300):
        other = ChannelRanges(K, x.device)
        other.update(piece)
        parts.merge(other)
    assert parts.tokens == whole.tokens == T
    assert torch.equal(parts.range, whole.range)
    assert torch.equal(whole.range, torch.stack((x.amin(0), x.amax(0))))
    assert torch.equal(whole.value, max_of(x))
