"""Registered metrics: their values, and what an evaluation makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quark.errors import ConfigError, PluginError, UnknownNameError
from quark.plugins import Catalog, MetricRecord, Source, hookimpl, using
from quark.plugins.discovery import discover
from quark_tiny_model import held_out_text, tiny_model, tiny_tokenizer
from quark_workbench.evaluate import compare, likelihood
from quark_workbench.evaluate.metrics import accuracy, entropy, total_variation

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
