"""When freed memory is given back, and which weights are refused: what a run does at each block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.errors import NonFiniteError
from quark.model.plan import QuantPlan
from quark.pipeline import ModelQuantizer, memory
from quark.pipeline.finite import refuse_non_finite
from quark.pipeline.memory import LEAST_RETURNED, FreedMemory
from quark.specs.model import QConfig
from quark.torch import LLMTemplate


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
