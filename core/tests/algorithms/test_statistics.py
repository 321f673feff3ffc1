"""Statistics: two merged statistics equal one of all tokens, so batches and ranks can be summed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quark.algorithms import AbsMax, AbsMean, CrossMoment, Hessian, Hessian64, OutputMoment, Statistic

CPU = torch.device("cpu")
READ: dict[type[Statistic], Callable[[Statistic], Tensor]] = {
    AbsMax: lambda found: found.value,  # type: ignore[attr-defined]
    AbsMean: lambda found: found.value,  # type: ignore[attr-defined]
    CrossMoment: lambda found: found.matrix(),  # type: ignore[attr-defined]
    Hessian: lambda found: found.matrix(),  # type: ignore[attr-defined]
    Hessian64: lambda found: found.matrix(),  # type: ignore[attr-defined]
    OutputMoment: lambda found: found.matrix(),  # type: ignore[attr-defined]
}


def seen(kind: type[Statistic], x: Tensor, reference: Tensor) -> Statistic:
    found = kind(x.shape[1], CPU)
    found.update(x, reference)
    return found


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.__name__)
def test_merged_statistics_are_those_of_all_tokens(kind: type[Statistic]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, reference = torch.randn(2, 64, 12, generator=generator)
    x[:40] *= 3  # the two parts differ, in number and in size
    whole = seen(kind, x, reference)
    for first, last in ((slice(40), slice(40, 64)), (slice(40, 64), slice(40))):
        merged = seen(kind, x[first], reference[first])
        merged.merge(seen(kind, x[last], reference[last]))
        assert merged.tokens == 64
        torch.testing.assert_close(READ[kind](merged), READ[kind](whole), rtol=1e-5, atol=1e-4)


def test_magnitudes_are_those_of_their_definition() -> None:
    x = torch.tensor([[1.0, -4.0], [-3.0, 0.0]])
    assert READ[AbsMax](seen(AbsMax, x, x)).tolist() == [3.0, 4.0]
    assert READ[AbsMean](seen(AbsMean, x, x)).tolist() == [2.0, 2.0]
    assert READ[AbsMean](AbsMean(2, CPU)).tolist() == [0.0, 0.0]


def _scaled_total(statistic: AbsMax, factor: float, offset: float) -> Tensor:
    return statistic.value.sum() * factor + offset


def test_what_is_derived_is_computed_once_for_each_function_and_arguments_and_anew_when_tokens_come() -> None:
    statistic, other = AbsMax(4, torch.device("cpu")), AbsMax(4, torch.device("cpu"))
    statistic.update(torch.ones(2, 4))
    first = statistic.derived(_scaled_total, 2.0, 1.0)
    assert float(first) == 9
    assert statistic.derived(_scaled_total, 2.0, 1.0) is first
    assert float(statistic.derived(_scaled_total, 3.0, 1.0)) == 13
    statistic.update(torch.full((1, 4), 2.0))
    assert float(statistic.derived(_scaled_total, 2.0, 1.0)) == 17
    other.update(torch.full((1, 4), -3.0))
    statistic.merge(other)
    assert float(statistic.derived(_scaled_total, 2.0, 1.0)) == 25


def test_channels_that_are_always_0_do_not_count_in_the_shrinkage_of_the_hessian() -> None:
    """The mean of the diagonal, from which its spread is measured, leaves these channels out."""
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) * torch.linspace(1, 2, 8)
    with_dead = torch.cat([x, torch.zeros(256, 24)], dim=1)
    alone, both = (Hessian(part.shape[1], CPU) for part in (x, with_dead))
    alone.update(x)
    both.update(with_dead)
    assert 0 < alone.shrinkage()[1] < 1
    assert both.shrinkage() == pytest.approx(alone.shrinkage(), rel=1e-5)


def test_more_tokens_are_shrunk_less_and_no_tokens_wholly() -> None:
    assert Hessian(8, CPU).shrinkage() == (1.0, 1.0)
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(8, 8, generator=generator)
    found = []
    for tokens in (32, 2048):
        statistic = Hessian(8, CPU)
        statistic.update(torch.randn(tokens, 8, generator=generator) @ mixing)
        found.append(statistic.shrinkage())
    assert found[1][0] < found[0][0]
    assert found[1][1] < found[0][1]
    assert all(0 < share <= 1 for pair in found for share in pair)


def test_work_is_counted_by_tokens_and_entries() -> None:
    x = torch.randn(5, 4)
    assert seen(Hessian, x, x).flops == 5 * 4 * (4 + 1)  # a triangle with its diagonal, two operations an entry
    assert seen(CrossMoment, x, x).flops == 2 * 5 * 4 * 4
    assert seen(AbsMax, x, x).flops == 0
    of_outputs = OutputMoment(4, CPU, 3)
    of_outputs.update(x, torch.randn(5, 3))
    assert of_outputs.flops == 2 * 5 * 3 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_moment_of_outputs_is_the_weight_times_that_of_inputs_and_their_errors(dtype: torch.dtype) -> None:
    """``Σ (W x_float) xᵀ = W (D + H)``; outputs in bfloat16 differ from W x_float by their rounding."""
    generator = torch.Generator().manual_seed(0)
    x, reference = torch.randn(2, 600, 200, generator=generator).to(dtype)
    weight = torch.randn(24, 200, generator=generator).to(dtype)
    parts = [OutputMoment(200, CPU, 24), OutputMoment(200, CPU, 24)]
    for part, tokens in zip(parts, (slice(599), slice(599, 600)), strict=True):
        part.update(x[tokens], reference[tokens] @ weight.t())
    parts[0].merge(parts[1])
    d, h = seen(CrossMoment, x, reference).matrix(), seen(Hessian, x, reference).matrix()  # type: ignore[attr-defined]
    expected = weight.double() @ (d.double() + h.double())
    error = torch.linalg.matrix_norm(parts[0].matrix() - expected) / torch.linalg.matrix_norm(expected)
    assert error < (1e-5 if dtype is torch.float32 else 2**-8)


@pytest.mark.parametrize("kind", [Hessian, Hessian64])
def test_the_hessian_of_bfloat16_inputs_is_exact_but_for_the_float32_sum(kind: type[Hessian]) -> None:
    """A float32 sum of n numbers is wrong by at most n rounding errors; a bfloat16 sum would exceed this."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(tokens, 200, generator=generator) * torch.logspace(-2, 2, 200)).bfloat16() for tokens in (700, 512, 1, 900)]
    expected = sum(x.double().t() @ x.double() for x in batches)
    bound = sum(map(len, batches)) * 2**-24 * sum(x.double().abs().t() @ x.double().abs() for x in batches)
    for dtype in (torch.bfloat16, torch.float32):
        hessian = kind(200, CPU)
        for batch in batches:
            x = batch.to(dtype, copy=True)
            hessian.update(x)
            x.zero_()  # as a layer may do
        assert (hessian.matrix().double() - expected).abs().le(bound).all()
        assert torch.equal(hessian.matrix(), hessian.matrix().t())
    assert not (expected.bfloat16().double() - expected).abs().le(bound).all()
