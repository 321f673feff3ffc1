"""Statistics: two of them merged have seen both sets of tokens, so that batches and ranks can be summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quark.algorithms import AbsMax, AbsMean, CrossMoment, Hessian, Hessian64, Statistic, statistics

CPU = torch.device("cpu")
READ: dict[type[Statistic], Callable[[Statistic], Tensor]] = {
    AbsMax: lambda found: found.value,  # type: ignore[attr-defined]
    AbsMean: lambda found: found.value,  # type: ignore[attr-defined]
    CrossMoment: lambda found: found.matrix(),  # type: ignore[attr-defined]
    Hessian: lambda found: found.matrix(),  # type: ignore[attr-defined]
    Hessian64: lambda found: found.matrix(),  # type: ignore[attr-defined]
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
    """They are no part of the mean of the diagonal, from which its spread is measured."""
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


@pytest.mark.parametrize("kind", [Hessian, Hessian64])
def test_the_hessian_of_bfloat16_inputs_is_exact_but_for_the_float32_sum(kind: type[Hessian]) -> None:
    """A sum of n numbers is wrong by n rounding errors at most; rounded to bfloat16 it is by more."""
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


@pytest.fixture
def precision() -> Iterator[Any]:
    """The precision of torch's matrix products on CPUs, ``ieee`` while a test runs."""
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    yield matmul
    matmul.fp32_precision = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Hessian, CrossMoment])
def test_products_are_those_of_bfloat16_where_both_inputs_are(
    kind: type[Statistic], dtype: torch.dtype, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference of two inputs, in a cross moment, is none; an error gives the precision back too."""
    allowed: list[str] = []

    def failing(*tensors: Tensor) -> None:
        allowed.append(precision.fp32_precision)
        raise RuntimeError("no memory")

    monkeypatch.setattr(statistics, "_add_product", failing)
    statistic = seen(kind, torch.ones(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype))
    with pytest.raises(RuntimeError, match="no memory"):
        statistic.flush()
    assert allowed == ["bf16" if dtype is torch.bfloat16 and kind is Hessian else "ieee"]
    assert precision.fp32_precision == "ieee"
