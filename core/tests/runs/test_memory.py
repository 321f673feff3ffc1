"""When freed memory is given back, and which weights are refused: what a run does at each block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.calibration.batches import calls
from quark.calibration.finite import refuse_non_finite
from quark.config.model import QConfig
from quark.errors import NonFiniteError
from quark.models.plan.quant_plan import QuantPlan
from quark.runs import ModelQuantizer, memory
from quark.runs.memory import LEAST_RETURNED, FreedMemory, held_probabilities, tokens_in
from quark.runs.run import plan_run
from quark.torch import LLMTemplate
from quark_tiny_model import tiny_model


def planned(model: nn.Module) -> QuantPlan:
    """Every linear layer's weight in int8."""
    return ModelQuantizer(QConfig(global_quant_config=LLMTemplate.get("llama").get_config(scheme="int8").global_quant_config)).plan(model)


def test_freed_memory_is_returned_when_enough_has_gathered_and_no_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr(memory, "return_freed", lambda: returned.append(1))
    freed = FreedMemory()
    after_each = []
    for size in (LEAST_RETURNED - 1, 1, LEAST_RETURNED - 1, 0, 1, 10 * LEAST_RETURNED):
        freed.add(size)
        after_each.append(len(returned))
    assert after_each == [0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_in_every_dtype(dtype: torch.dtype, value: float) -> None:
    model = nn.Sequential(nn.Linear(16, 8, dtype=dtype))
    rows = planned(model).quantized
    refuse_non_finite(model, rows)
    model[0].weight.data[3, 5] = value
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        refuse_non_finite(model, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_finite_weights_whose_sum_overflows_are_not_refused(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 8, dtype=dtype))
    model[0].weight.data.fill_(torch.finfo(dtype).max)
    refuse_non_finite(model, planned(model).quantized)


def test_the_tokens_of_a_run_are_those_of_all_its_samples_in_whatever_form() -> None:
    ids = torch.ones(2, 6, dtype=torch.long)
    assert tokens_in(calls([ids[:1], {"input_ids": ids, "attention_mask": ids}, torch.ones(3, 5, 32)])) == 6 + 12 + 15
    assert tokens_in([]) == 0


def test_probabilities_that_wait_for_their_scale_are_all_pairs_of_tokens_of_all_heads() -> None:
    model = tiny_model()
    pairs = 2 * 6 * 6 + 10 * 10
    heads = model.config.num_attention_heads
    data = calls([{"input_ids": torch.ones(2, 6, dtype=torch.long)}, torch.ones(1, 10, dtype=torch.long)])
    assert held_probabilities(model, data) == 2 * 4 * heads * pairs, "logits and softmax, in float32"


@pytest.mark.parametrize(("attention", "expected"), [(None, False), ("fp8", True)])
def test_probabilities_count_when_it_is_decided_how_often_blocks_are_passed(attention: str | None, expected: bool) -> None:
    """The bound lies between the bytes that forwards hold with probabilities and without."""
    data = [torch.ones(1, 512, dtype=torch.long)]
    for memory_bound, always in ((1 << 40, False), (0, True)):
        assert passes(attention, data, memory_bound) is always
    model = tiny_model()
    without = held_probabilities(model, calls(data))
    assert passes(attention, data, without) is expected


def passes(attention: str | None, data: list[torch.Tensor], bound: int) -> bool:
    """Whether blocks are passed twice."""
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32", algorithm="gptq", attention_scheme=attention)
    config.activation_memory = bound
    model = tiny_model()
    return plan_run(model, config).with_data(model, data, torch.device("cpu")).two_passes
