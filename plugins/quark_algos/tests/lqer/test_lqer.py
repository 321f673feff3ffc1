"""LQER is the best product of its rank, by the error that it weighs, and lowers that of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quark.algorithms import AbsMean, BranchSite, BranchTask, Hessian, Statistic
from quark.config.layer import QLayerConfig
from quark.errors import ConfigError
from quark.plugins import schemes
from quark.torch import LLMTemplate
from quark_algos.lqer.config import SCALINGS, LQERConfig
from quark_algos.lqer.lqer import LQER
from quark_devkit.algorithm_runs import logit_error
from quark_devkit.small_models import small_model

SHAPES = ((96, 64), (64, 128))


def site(shape: tuple[int, int], dtype: torch.dtype = torch.float64) -> BranchSite:
    config: QLayerConfig = schemes().load_config("int4_wo_32")()
    return BranchSite("a.layer", shape, dtype, config)


def inputs(columns: int, tokens: int = 500) -> Tensor:
    """Inputs whose channels differ in size, and are correlated."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
    return (
        torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
        @ (torch.eye(columns) + mixing)
        * torch.logspace(-1, 1, columns)
    )


def task(shape: tuple[int, int], *kinds: type[Statistic], rounded: bool = True) -> BranchTask:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    statistics: dict[type[Statistic], Statistic] = {}
    for kind in kinds:
        statistics[kind] = kind(shape[1], torch.device("cpu"))
        statistics[kind].update(inputs(shape[1]))
    return BranchTask(site(shape), weight, statistics, (2 * weight).round() / 2 if rounded else None)


def product(lqer: LQER, of: BranchTask) -> Tensor:
    made = lqer.tensors(of)
    return made["b"] @ made["a"]


def best(error: Tensor, weighing: Tensor, rank: int) -> Tensor:
    """The least ``‖(E − P) S‖`` of all P of a rank: that of singular values behind it."""
    return torch.linalg.svdvals(error @ weighing)[rank:].square().sum()


@pytest.mark.parametrize("rank", [1, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_the_best_of_its_rank(shape: tuple[int, int], rank: int) -> None:
    of = task(shape, AbsMean, Hessian)
    assert of.rounded is not None
    error, x = of.weight - of.rounded, inputs(shape[1])
    mean = torch.diag(x.abs().mean(0))
    factor = torch.linalg.cholesky(x.t() @ x)
    for scaling, weighing in (("none", torch.eye(shape[1], dtype=torch.float64)), ("abs_mean", mean), ("hessian", factor)):
        found = product(LQER(LQERConfig(rank=rank, scaling=scaling)), of)
        assert torch.linalg.matrix_rank(found) == rank
        least = best(error, weighing, rank)
        # The second moment is damped, and sums of it are in float32.
        torch.testing.assert_close(((error - found) @ weighing).square().sum(), least, rtol=2e-3 if scaling == "hessian" else 1e-5, atol=0)


def test_the_error_of_outputs_is_least_by_the_second_moment() -> None:
    of, x = task(SHAPES[1], AbsMean, Hessian), inputs(SHAPES[1][1])
    assert of.rounded is not None
    error = of.weight - of.rounded
    left = {s: float((x @ (error - product(LQER(LQERConfig(rank=8, scaling=s)), of)).t()).square().sum()) for s in SCALINGS}
    assert left["hessian"] < left["abs_mean"] < left["none"] < float((x @ error.t()).square().sum())


def test_a_part_that_is_taken_from_the_weight_leaves_the_rest() -> None:
    lqer = LQER(LQERConfig(rank=5, scaling="none", from_weight=True))
    of = task(SHAPES[0], rounded=False)
    taken = of.weight - lqer.weight_to_round(of)
    assert torch.linalg.matrix_rank(taken) == 5
    torch.testing.assert_close((of.weight - taken).square().sum(), best(of.weight, torch.eye(SHAPES[0][1], dtype=torch.float64), 5))
    plain = LQER(LQERConfig(rank=5))
    assert plain.weight_to_round(of) is of.weight


@pytest.mark.parametrize("scaling", SCALINGS)
def test_layers_without_an_error_and_without_inputs_have_a_finite_product(scaling: str) -> None:
    lqer = LQER(LQERConfig(rank=200, scaling=scaling))
    of = task(SHAPES[0])
    exact = BranchTask(of.site, of.weight, {}, of.weight)
    assert not product(lqer, exact).any()
    dead: Any = lqer.needs[0](SHAPES[0][1], torch.device("cpu")) if lqer.needs else None
    if dead is not None:
        dead.update(torch.zeros(5, SHAPES[0][1]))
        assert product(lqer, BranchTask(of.site, of.weight, {type(dead): dead}, of.rounded)).isfinite().all()
    full = product(lqer, of)
    assert of.rounded is not None
    torch.testing.assert_close(full, of.weight - of.rounded, rtol=0, atol=1e-9)
    assert lqer.branch(of.site).a.shape == (64, 64), "the rank is at most the smaller side"


@pytest.mark.parametrize("rounding", [None, "gptq"])
def test_logits_of_a_model_come_nearer_with_the_rank(rounding: str | None) -> None:
    others = LLMTemplate.get("llama").get_config("int4_wo_32", algorithm=rounding).algo_config or []
    errors = [logit_error("int4_wo_32", *others, *own) for own in ((), (LQERConfig(rank=4),), (LQERConfig(rank=24),))]
    assert errors[0] > errors[1] > errors[2]
    assert len(list(small_model().parameters())) > 0


@pytest.mark.parametrize("values", [{"rank": 0}, {"rank": -1}, {"rank": 1.5}, {"scaling": "mean"}])
def test_other_settings_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError, TypeError)):
        LQERConfig(**values)
