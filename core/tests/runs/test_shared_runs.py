"""A deterministic run by several ranks gives the same bits as a run by a single rank.

Here ranks are threads.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

from quark.algorithms import AbsMax
from quark.base.ranks import ALONE, Ranks
from quark.errors import UnsupportedError
from quark.runs.quantize_block import quantize_run
from quark.runs.run import plan_run
from quark.runs.sink import InPlaceSink
from quark.torch import LLMTemplate
from quark_devkit.small_models import batches, small_model
from quark_devkit.threads import in_threads
from quark_devkit.whole_runs import shared_report

CALLS = 7
"""As many for no number of ranks."""

RUNS: dict[str, dict[str, Any]] = {
    "to nearest": {"scheme": "int4_wo_64"},
    "GPTQ": {"scheme": "int4_wo_64", "algorithm": ["gptq"]},
    "GPTQ in two passes": {"scheme": "int4_wo_64", "algorithm": ["gptq"], "activation_memory": 0},
    "GPTAQ": {"scheme": "int4_wo_64", "algorithm": ["gptaq"]},
    "AWQ": {"scheme": "int4_wo_64", "algorithm": ["awq"]},
    "AWQ and GPTQ": {"scheme": "int4_wo_64", "algorithm": ["awq", "gptq"]},
    "AutoSmoothQuant": {"scheme": "int8", "algorithm": ["autosmoothquant"]},
    "SmoothQuant, static inputs and cache": {"scheme": "fp8", "algorithm": ["smoothquant"], "kv_cache_scheme": "fp8"},
    "GPTQ, static inputs and cache": {"scheme": "fp8", "algorithm": ["gptq"], "kv_cache_scheme": "fp8"},
    "GPTQ, scales of heads in the cache": {"scheme": "fp8", "algorithm": ["gptq"], "kv_cache_scheme": "fp8_per_head"},
    "rotation": {"scheme": "int4_wo_64", "algorithm": ["rotation"]},
    "branches": {"scheme": "int4_wo_64", "algorithm": ["lqer"]},
    "GPTQ and branches in two passes": {"scheme": "int4_wo_64", "algorithm": ["gptq", "lqer"], "activation_memory": 0},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "GPTQ": {"scheme": "int4_wo_64", "algorithm": ["gptq"]},
    "GPTQ in two passes": {"scheme": "int4_wo_64", "algorithm": ["gptq"], "activation_memory": 0},
    "AWQ": {"scheme": "int4_wo_64", "algorithm": ["awq"]},
    "GPTQ, pooled static inputs": {"scheme": "fp8", "algorithm": ["gptq"]},
    "GPTQ and branches": {"scheme": "int4_wo_64", "algorithm": ["gptq", "lqer"]},
}


@cache
def llama() -> nn.Module:
    return small_model()


@cache
def mixtral() -> nn.Module:
    """A mixture in which some calls reach no token of some experts."""
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=1,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def run_by(ranks: Ranks, model: nn.Module, options: dict[str, Any], data: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the quantized model, and the report of the run."""
    options = dict(options)
    memory = options.pop("activation_memory", None)
    config = LLMTemplate.get(str(model.config.model_type)).get_config(**options)  # type: ignore[union-attr]
    config.activation_memory = memory
    run = plan_run(model, config).with_data(model, data, torch.device("cpu"), ranks)
    quantize_run(run, model, InPlaceSink(model))
    report: Any = model.quark_report
    return {name: t.clone() for name, t in model.state_dict().items() if not t.is_meta}, shared_report(report)


def shared(model: nn.Module, options: dict[str, Any], data: list[Tensor], size: int) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    models = [copy.deepcopy(model) for _ in range(size)]
    return in_threads(lambda ranks: run_by(ranks, models[ranks.rank], options, data), size, is_deterministic=True)


def assert_same(model: nn.Module, options: dict[str, Any], data: list[Tensor], sizes: tuple[int, ...]) -> None:
    (alone, report), *_ = shared(model, options, data, 1)
    for size in sizes:
        for rank, (tensors, other) in enumerate(shared(model, options, data, size)):
            different = [name for name in alone if not torch.equal(alone[name], tensors[name])]
            assert (different, size, rank) == ([], size, rank)
            assert tensors.keys() == alone.keys()
            assert other == report


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", RUNS)
def test_two_and_three_ranks_come_to_the_bits_of_one(name: str) -> None:
    assert_same(llama(), RUNS[name], batches(CALLS, 32), (2, 3))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_some_ranks_have_no_token_for_are_the_same_on_all(name: str) -> None:
    assert_same(mixtral(), EXPERTS[name], batches(CALLS, 5), (2, 3))


def test_sequences_of_different_lengths_and_ranks_without_any_make_no_difference() -> None:
    data = [x[:, : 9 + 11 * (i % 3)] for i, x in enumerate(batches(3, 32))]
    assert_same(llama(), RUNS["GPTQ"], data, (2, 5))
    assert_same(llama(), RUNS["GPTQ in two passes"], data, (2, 5))


def test_a_run_that_is_not_deterministic_comes_to_one_result_on_all_ranks_and_nearly_that_of_one() -> None:
    options, data = RUNS["GPTQ"], batches(CALLS, 32)
    alone, _ = run_by(ALONE, copy.deepcopy(llama()), options, data)
    models = [copy.deepcopy(llama()) for _ in range(3)]
    first, *others = (tensors for tensors, _ in in_threads(lambda ranks: run_by(ranks, models[ranks.rank], options, data), 3))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    differing = sum(int((first[name] != alone[name]).sum()) for name in first)
    assert differing < 0.01 * sum(t.numel() for t in first.values())


def test_each_rank_runs_its_own_calls_alone() -> None:
    models = [copy.deepcopy(llama()) for _ in range(2)]
    seen: list[list[Tensor]] = [[], []]

    def counted(ranks: Ranks) -> None:
        model: Any = models[ranks.rank]
        model.model.embed_tokens.register_forward_pre_hook(lambda _, args: seen[ranks.rank].append(args[0].clone()))
        run_by(ranks, model, RUNS["GPTQ"], data)

    data = batches(CALLS, 32)
    in_threads(counted, 2)
    assert torch.equal(torch.cat(seen[0] + seen[1]), torch.cat(data))
    assert {len(each) for each in seen} == {3, 4}


def test_a_statistic_that_cannot_be_sent_is_refused_in_words() -> None:
    class Local(AbsMax):
        """Defined where the module pickle cannot find it."""

    with pytest.raises(UnsupportedError, match="a Local cannot be sent to the other processes of this run"):
        in_threads(lambda ranks: Local(4, torch.device("cpu")).of_all_ranks(ranks), 2)
