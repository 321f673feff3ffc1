"""Registered metrics: their values, and what an evaluation makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quark.errors import ConfigError, PluginError, UnknownNameError
from quark.plugins import Catalog, MetricRecord, Source, hookimpl, using
from quark.plugins.discovery import discover
from quark_tiny_model import held_out_text, tiny_model, tiny_tokenizer
from quark_workbench.evaluate import Windows, compare, likelihood
from quark_workbench.evaluate.metrics import Mean, accuracy, entropy, mean_over, percentile, total_variation

from .test_figures import Table, table, tokens

UNIFORM = torch.full((1, 4), -math.log(4))
CERTAIN = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf]])


def windows() -> Tensor:
    ids = torch.tensor(tiny_tokenizer()(held_out_text()[:2000])["input_ids"])
    return ids[: 4 * 64].view(4, 64)


def test_values_of_the_built_in_metrics() -> None:
    target = torch.tensor([0])
    assert accuracy(CERTAIN, target).tolist() == [1]
    assert accuracy(CERTAIN, torch.tensor([2])).tolist() == [0]
    # float32 logarithms and exponentials of 1/4, summed over 4.
    assert entropy(UNIFORM, target).item() == pytest.approx(math.log(4), rel=1e-6)
    assert entropy(CERTAIN, target).item() == 0
    assert total_variation(CERTAIN, target, UNIFORM).item() == pytest.approx(0.75, rel=1e-6)
    assert total_variation(UNIFORM, target, UNIFORM).item() == 0


def test_an_evaluation_gives_their_means() -> None:
    model, tokens = tiny_model(), windows()
    with torch.no_grad():
        predicted = model(tokens[:, :-1]).logits.argmax(-1)
    result = likelihood(model, [tokens[:2], tokens[2:]], ["accuracy", "entropy"])
    assert result.metrics["accuracy"].value == pytest.approx((predicted == tokens[:, 1:]).double().mean().item(), rel=1e-12)
    assert result.metrics["accuracy"].error is not None
    assert 0 < result.metrics["entropy"].value < math.log(1024)
    same = compare(model, tiny_model(), [tokens], ["total_variation", "accuracy"])
    assert same.metrics["total_variation"].value == 0
    assert same.metrics["accuracy"].value == result.metrics["accuracy"].value


def test_a_metric_that_cannot_be_measured_is_refused_first() -> None:
    with pytest.raises(ConfigError, match="'total_variation' compares with a reference model"):
        likelihood(tiny_model(), [], ["total_variation"])
    with pytest.raises(UnknownNameError, match="acuracy"):
        likelihood(tiny_model(), [], ["acuracy"])


def one_number(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return log_q.sum()


def not_finite(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return torch.full(targets.shape, math.nan)


def raises(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    raise KeyError("no")


def margin(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    best = log_q.topk(2).values
    return best[:, 0] - best[:, 1]


@pytest.fixture
def third_party() -> Iterator[None]:
    class Plugin:
        @hookimpl
        def quark_register_metrics(self) -> Iterator[MetricRecord]:
            for function in (one_number, not_finite, raises, margin):
                yield MetricRecord(name=function.__name__, metric=f"{__name__}:{function.__name__}")

    catalog = Catalog(discover())
    catalog.add(Plugin(), Source("acme-quant", "0.1", entry_point="acme"))
    with using(catalog):
        yield


@pytest.mark.usefixtures("third_party")
def test_a_third_party_brings_a_metric() -> None:
    assert likelihood(tiny_model(), [windows()], ["margin"]).metrics["margin"].value > 0


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize("name", ["one_number", "not_finite", "raises"])
def test_a_broken_metric_is_named_with_its_plugin(name: str) -> None:
    with pytest.raises(PluginError, match=f"{name}.*acme-quant"):
        likelihood(tiny_model(), [windows()], [name])


def test_entropies_are_summed_in_double_precision_and_0_where_a_prediction_is_certain() -> None:
    log_q = torch.log_softmax(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = entropy(log_q, torch.zeros(3, dtype=torch.long))
    assert found.dtype is torch.float64
    expected = -(log_q.double().exp() * log_q.double()).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    certain = torch.tensor([[0.0, -torch.inf]])
    assert entropy(certain, torch.zeros(1, dtype=torch.long)).tolist() == [0.0]


def test_of_windows_with_one_token_it_is_the_error_of_independent_values() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert mean_over(values, torch.arange(50)).error == pytest.approx(float(values.std()) / math.sqrt(50), rel=1e-12)


def test_repeating_each_value_in_its_window_tells_nothing_new() -> None:
    values = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    once, often = mean_over(values, torch.arange(20)), mean_over(values.repeat_interleave(9), torch.arange(20).repeat_interleave(9))
    assert often.error == pytest.approx(once.error, rel=1e-12)


def test_the_error_is_the_spread_of_means_over_draws_of_windows() -> None:
    g = torch.Generator().manual_seed(0)
    window = torch.arange(40).repeat_interleave(25)
    means, errors = [], []
    for _ in range(400):
        level = torch.randn(40, generator=g, dtype=torch.float64).repeat_interleave(25)
        drawn = mean_over(level + torch.randn(1000, generator=g, dtype=torch.float64), window)
        means.append(drawn.value)
        errors.append(drawn.error)
    spread = float(torch.tensor(means).std())
    assert sum(e for e in errors if e is not None) / 400 == pytest.approx(spread, rel=0.15)  # 400 draws know the spread to 3.5 %
    assert spread > 3 * math.sqrt(2 / 1000), "tokens taken for independent would give far less"


def test_one_window_has_no_error() -> None:
    assert mean_over(torch.arange(5.0, dtype=torch.float64), torch.zeros(5, dtype=torch.int64)) == Mean(2.0, None)
    assert Mean(2.0, None).exp() == Mean(math.exp(2), None)
    assert Mean(1e9, 1.0).exp() == Mean(math.inf, None)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.sampled_from([50, 90, 99, 99.9]))
def test_a_percentile_is_the_least_value_that_covers_its_share(values: list[int], percent: float) -> None:
    found = percentile(torch.tensor(values, dtype=torch.float64), percent)
    assert sum(v <= found for v in values) >= percent / 100 * len(values) - 1e-6
    assert sum(v < found for v in values) < percent / 100 * len(values)


def test_statistics_of_a_comparison_are_those_of_its_tokens() -> None:
    model, reference, ids = table(1, torch.float64), table(2, torch.float64), tokens(3, 6, 9)
    log_q, log_p = (m(ids)[:, :-1].log_softmax(-1) for m in (model, reference))
    right = [x.gather(-1, ids[:, 1:, None])[..., 0].detach() for x in (log_q, log_p)]
    shift = (right[0].exp() - right[1].exp()).flatten()
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).detach()
    found = compare(model, reference, [ids[:4], ids[4:]])
    assert found.probability_shift == pytest.approx(float(shift.mean()), rel=1e-12)
    assert found.probability_shift_rms == pytest.approx(float(shift.square().mean().sqrt()), rel=1e-12)
    assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-12)
    assert found.median_kl == pytest.approx(float(kl.flatten().kthvalue(24).values), rel=1e-12)
    assert found.mean_kl_error == pytest.approx(float(kl.mean(1).std()) / math.sqrt(6), rel=1e-12)
    ratio = (right[1] - right[0]).mean(1)
    assert found.perplexity_ratio == pytest.approx(found.perplexity / found.reference_perplexity, rel=1e-12)
    assert found.perplexity_ratio_error == pytest.approx(found.perplexity_ratio * float(ratio.std()) / math.sqrt(6), rel=1e-12)


def test_paired_models_have_a_far_smaller_error_of_the_ratio_than_of_each() -> None:
    reference = table(2, torch.float64)
    model = Table(reference.table.detach() * 1.01)
    found = compare(model, reference, [tokens(3, 20, 9)])
    assert found.perplexity_ratio_error is not None
    assert found.perplexity_error is not None
    assert found.perplexity_ratio_error * 10 < found.perplexity_error / found.perplexity


def test_only_scored_tokens_count_in_either() -> None:
    model, ids = table(1, torch.float64), tokens(3, 2, 9)
    windows = Windows(ids, torch.tensor([3, 8]))
    log_p = model(ids).log_softmax(-1).detach()
    nats = [-float(log_p[0, i - 1, ids[0, i]]) for i in range(3, 9)] + [-float(log_p[1, 7, ids[1, 8]])]
    found = likelihood(model, [windows])
    assert (found.tokens, found.perplexity.value) == (7, pytest.approx(math.exp(sum(nats) / 7), rel=1e-12))
    assert found.bits_per_token == pytest.approx(sum(nats) / 7 / math.log(2), rel=1e-12)
    assert compare(model, table(2), [windows]).tokens == 7
