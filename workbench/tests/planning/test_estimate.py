"""Estimates of the memory that a run holds and of the files that it writes."""

from __future__ import annotations

import attrs
import pytest
import torch

import quark_tiny_model as tiny
from quark.runs.run import plan_run
from quark.torch import LLMTemplate
from quark_workbench.planning.estimate import Estimate, Output, _activations, _being_written
from quark_workbench.planning.workload import Calibration, Workload


def test_forwards_of_two_passes_hold_nothing_inside_a_block_but_what_it_computes() -> None:
    """Two passes are made to hold less: in one, all forwards wait inside the block at once."""
    model = tiny.tiny_model()
    run = plan_run(model, LLMTemplate.get("llama").get_config(scheme="int4_wo_32", algorithm=["gptq"]))
    hidden = {}
    for sequences in (4, 64):
        size = Calibration(sequences, 128)
        one, two = (_activations(model, attrs.evolve(run, two_passes=two), size) for two in (False, True))
        hidden[sequences] = 2 * size.tokens * model.config.hidden_size * 4 * run.algorithms.streams
        assert two < one
        assert two > hidden[sequences]
        hidden[sequences] = two - hidden[sequences]
    assert hidden[4] == hidden[64], "the rest is that of one forward, however many there are"


@pytest.mark.parametrize(("device", "expected"), [("cpu", 0), ("cuda", 300)])
def test_what_lies_on_a_device_is_all_but_the_program_freed_memory_and_files(device: str, expected: int) -> None:
    memory = {"the program and its modules": 1, "freed memory": 10, "files being written": 20, "one block": 100, "activations": 200}
    found = Estimate(None, memory, Workload(*[0] * (len(attrs.fields(Workload)))), device=device)
    assert found.device_bytes == expected
    assert found.peak_bytes == 331
    assert found.memory_of_program == 1


@pytest.mark.parametrize(("device", "expected"), [("cpu", 5 + 3), ("cuda", 32 + 5)])
def test_tensors_that_are_stored_as_they_are_take_no_memory_of_their_own_on_the_cpu(device: str, expected: int) -> None:
    model = torch.nn.Linear(4, 2, bias=False)
    parts = [{"weight": model.weight.detach()}, *({"codes": torch.empty(size, dtype=torch.uint8)} for size in (3, 5, 2))]
    assert _being_written(model, parts, torch.device(device)) == expected
    halves = {"weight": model.weight.detach().bfloat16()}
    assert _being_written(model, [halves], torch.device("cpu")) == 16, "another dtype is a copy"


def test_bits_of_a_weight_are_those_of_what_is_written() -> None:
    output = Output({"a": 3, "b": 4}, quantized_bits=90, quantized_weights=20, bits=200, weights=40)
    assert (output.bytes, output.bits_per_quantized_weight, output.bits_per_weight) == (7, 4.5, 5.0)
    empty = Output({}, 0, 0, 0, 0)
    assert (empty.bits_per_quantized_weight, empty.bits_per_weight) == (0.0, 0.0)
