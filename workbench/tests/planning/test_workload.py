"""FLOPs and bytes of a run, counted by hand on small models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quark.algorithms import CrossMoment, Hessian, Hessian64, Statistic
from quark.models.plan.family import template_of
from quark.runs.run import plan_run
from quark_workbench.planning.workload import Calibration, statistics_bytes, workload_of

HIDDEN, INNER, LAYERS, HEADS, EXPERTS, CHOSEN = 64, 128, 2, 2, 8, 2
DATA = Calibration(sequences=3, length=10)


def work(model_type: str, algorithm: str | None = "gptq", **sizes: int):  # type: ignore[no-untyped-def]
    config = AutoConfig.for_model(
        model_type,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        vocab_size=32,
        pad_token_id=0,
        **sizes,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return workload_of(model, plan_run(model, template_of(model).get_config(scheme="int4_wo_32", algorithm=algorithm)), DATA)


def test_a_dense_model_is_counted_by_hand() -> None:
    found = work("llama")
    linear = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    assert found.forwards == 1
    assert found.forward == DATA.tokens * LAYERS * (2 * linear + 4 * DATA.length * HIDDEN)
    # q, k, v share an input; o has its own; gate and up share one; down has its own.
    groups = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    assert found.statistics == LAYERS * sum(DATA.tokens * k * k for _, k in groups)
    assert found.solver == LAYERS * sum(k**3 // 3 + n * k * k for n, k in groups)
    assert found.rounded == LAYERS * linear


def test_without_data_nothing_but_rounding_is_done() -> None:
    found = work("llama", None)
    assert (found.flops, found.forwards) == (0, 0)
    assert found.rounded > 0


def test_a_token_passes_the_experts_that_it_is_routed_to() -> None:
    found = work("mixtral", num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    linear = 4 * HIDDEN * HIDDEN + CHOSEN * 3 * HIDDEN * INNER
    attention = 4 * DATA.length * HIDDEN
    assert found.forward == DATA.tokens * LAYERS * (2 * linear + attention)
    of_experts = {task.tokens for task in found.tasks if INNER in (task.rows, task.rows / 2, task.columns)}
    assert of_experts == {round(DATA.tokens * CHOSEN / EXPERTS)}


@pytest.mark.parametrize(("kind", "size"), [(Hessian, 4), (Hessian64, 8), (CrossMoment, 4)])
def test_statistics_take_what_their_constructors_allocate(kind: type[Statistic], size: int) -> None:
    class Rounding:
        needs = (kind,)

    assert statistics_bytes(Rounding(), 100) == size * 100 * 100  # type: ignore[arg-type]


@pytest.mark.parametrize(("algorithms", "forwards"), [(["gptq"], 1), (["awq"], 1), (["awq", "gptq"], 2), (["gptaq"], 2)])
def test_transforms_that_need_statistics_and_the_float_stream_cost_a_pass_each(algorithms: list[str], forwards: int) -> None:
    found = work("llama", algorithms)  # type: ignore[arg-type]
    assert found.forwards == forwards + (algorithms == ["awq"])  # the rounding to nearest behind a transform has calibration of its own
    assert found.forward == forwards * work("llama").forward + (algorithms == ["awq"]) * work("llama").forward
