"""Steps of a run at each block: freed memory goes back to the system, and invalid weights are refused."""

from __future__ import annotations

import pytest
import torch

from quark.calibration.batches import calls
from quark.runs import memory
from quark.runs.memory import LEAST_RETURNED, FreedMemory, held_probabilities, tokens_in
from quark.runs.run import plan_run
from quark.torch import LLMTemplate
from quark_tiny_model import tiny_model


def test_freed_memory_is_returned_when_enough_has_gathered_and_no_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr(memory, "return_freed", lambda: returned.append(1))
    freed = FreedMemory()
    after_each = []
    for size in (LEAST_RETURNED - 1, 1, LEAST_RETURNED - 1, 0, 1, 10 * LEAST_RETURNED):
        freed.add(size)
        after_each.append(len(returned))
    assert after_each == [0, 1, 1, 1, 2, 3]


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
    """The memory limit lies between the bytes that forwards hold with and without probabilities."""
    data = [torch.ones(1, 512, dtype=torch.long)]
    for memory_bound, always in ((1 << 40, False), (0, True)):
        assert passes(attention, data, memory_bound) is always
    model = tiny_model()
    without = held_probabilities(model, calls(data))
    assert passes(attention, data, without) is expected


def passes(attention: str | None, data: list[torch.Tensor], bound: int) -> bool:
    """Return whether a run passes each block twice."""
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32", algorithm="gptq", attention_scheme=attention)
    config.activation_memory = bound
    model = tiny_model()
    return plan_run(model, config).with_data(model, data, torch.device("cpu")).two_passes
