"""Scales, codes and statistics are the same bits whatever the number of threads that compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import quark
import quark.numbers.single_level
import quark.numbers.tiles
import quark_algos.gptq.gptq
import quark_algos.scale_search
from quark.algorithms import CrossMoment, Hessian
from quark.numbers import TensorQuantizer, WeightGrid, quantizer_for
from quark_algos.equalization.candidates import Quadratic
from quark_algos.equalization.search import Part, awq
from quark_algos.gptq.damping import factor
from quark_algos.gptq.gptq import ldlq, ldlq_by_rows
from quark_algos.scale_search import group_moments, search

K, N = 256, 128
SCHEMES = ["int4_wo_64", "uint4_wo_32", "int8", "fp8", "mxfp4", "nvfp4"]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_same_bits(compute: Callable[[], list[Tensor]]) -> None:
    """Compute with 1, 2 and 3 threads, and compare."""
    torch.set_num_threads(1)
    expected = compute()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for one, other in zip(compute(), expected, strict=True):
            assert torch.equal(one, other)


def weight() -> Tensor:
    """Wᵀ ``[K, N]``."""
    return torch.randn(K, N, generator=torch.Generator().manual_seed(0)) * 0.05


def inputs(tokens: int = 300) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(tokens, K, generator=g) @ (torch.eye(K) + torch.randn(K, K, generator=g) / K**0.5)


def quantizer_of(scheme: str) -> TensorQuantizer:
    return quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_that_are_searched(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quark_algos.scale_search, "PIECE", 17 * K)
    wt, x = weight(), inputs()
    grid = WeightGrid([quantizer_of(scheme)], [N], wt)

    h = x.t() @ x
    assert_same_bits(lambda: [search(wt, grid, moments).stored.float() for moments in (group_moments(h, grid.group), None)])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_of_columns_that_are_swept_over_by_rows(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quark_algos.gptq.gptq, "SLICE", 50)
    wt, x = weight(), inputs()
    grid = WeightGrid([quantizer_of(scheme)], [N], wt)
    each = grid.with_subscales(wt, grid.fixed or grid.scales(wt))
    h = x.t() @ x
    order = torch.argsort(h.diagonal(), descending=True)
    found = factor(h, 0.01, order)

    def swept() -> list[Tensor]:
        done = ldlq_by_rows(wt, found, grid, each, 128, order)
        return [done.q, done.e, done.loss]

    assert_same_bits(swept)
    whole = ldlq(wt, found, grid.rounder(each, order), 128, order)
    torch.testing.assert_close(swept()[2].sum(), whole.loss.sum(), rtol=0.02, atol=0)  # ties may fall otherwise in few rows


@pytest.mark.parametrize("scheme", ["int4_wo_64", "nvfp4"])
def test_scales_that_awq_chooses(scheme: str) -> None:
    wt, x = weight(), inputs()
    quantizer = quantizer_of(scheme)
    h = x.t() @ x
    part = Part(wt, Quadratic(h), lambda t: WeightGrid([quantizer], [N], t), tokens=len(x))

    def chosen() -> list[Tensor]:
        choice = awq([part], x.abs().mean(0))
        return [choice.scale, choice.tried.nan_to_num(-1.0), torch.tensor([choice.loss, choice.plain])]

    assert_same_bits(chosen)


@pytest.mark.parametrize("kind", [Hessian, CrossMoment])
def test_statistics_of_inputs(kind: type[Hessian] | type[CrossMoment]) -> None:
    x, reference = inputs(5000), inputs(5000).flip(0)

    def total() -> list[Tensor]:
        statistic = kind(K, torch.device("cpu"))
        for one, other in zip(x.split(700), reference.split(700), strict=True):
            statistic.update(one, other)
        return [statistic.matrix()]

    assert_same_bits(total)


def test_a_statistic_has_seen_what_its_input_was_and_not_what_a_layer_has_made_of_it() -> None:
    x = inputs()
    statistic, expected = Hessian(K, torch.device("cpu")), x.t() @ x
    statistic.update(x)
    x.zero_()
    torch.testing.assert_close(statistic.matrix(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_and_codes_of_a_tensor(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quark.numbers.tiles, "CHUNK_ELEMENTS", 9 * K)
    monkeypatch.setattr(quark.numbers.single_level, "CHUNK_ELEMENTS", 9 * K)
    monkeypatch.setattr(quark.numbers.single_level, "TILE_ELEMENTS", 3 * K)
    w, quantizer = weight().t().contiguous(), quantizer_of(scheme)

    def results() -> list[Tensor]:
        values, qparams = quantizer.round_to_nearest(w)
        codes = quantizer.codes_of(values, qparams)
        return [values, qparams.scale.float(), codes.float(), quantizer.dequantize(codes, qparams), quantizer.fake_quantize(w, qparams)]

    assert_same_bits(results)
