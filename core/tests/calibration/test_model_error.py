"""The reported error of the last block's output is the error of the finished model.

If an algorithm does harm, there is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from quark.algorithms import OutputError, Rounding, RoundingTask, RoundToNearest
from quark.calibration import model_error, rounding_validation
from quark.calibration.batches import Call, ids_of
from quark.calibration.model_error import ONE_IN, ModelError
from quark.calibration.report import CalibrationReport
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.quant_plan import make_plan
from quark.runs import quantize_checkpoint
from quark.runs.started_run import FinishedRun
from quark.torch import ModelQuantizer
from quark_tiny_model import KINDS, calibration_batches, tiny_model, tiny_model_dir, tiny_template

DATA = calibration_batches(8, 256)
TOKENS = 8 * 256 // ONE_IN
RUNS = [*(("gptq", "int4_wo_64", kind) for kind in KINDS), ("qronos", "mxfp4", "llama"), ("awq+gptq", "int4_wo_64", "llama")]


def config(algorithm: str | None, scheme: str = "int4_wo_64", kind: str = "llama", **options: Any) -> Any:
    made = tiny_template(kind).get_config(scheme=scheme, algorithm=None if algorithm is None else algorithm.split("+"))
    for name, value in options.items():
        setattr(made, name, value)
    return made


def quantized(algorithm: str | None, scheme: str = "int4_wo_64", kind: str = "llama", **options: Any) -> Any:
    return ModelQuantizer(config(algorithm, scheme, kind, **options)).quantize_model(tiny_model(kind=kind), DATA)


def last_output(model: nn.Module, kind: str) -> Tensor:
    """Return the output of the last block of a model for the compared tokens."""
    outputs = []
    block = model.get_submodule(tiny_template(kind).architecture.decoder_blocks)[-1]  # type: ignore[index]
    handle = block.register_forward_hook(lambda _, __, output: outputs.append(output if isinstance(output, Tensor) else output[0]))
    with torch.no_grad():
        model(DATA[0][:, :TOKENS])
    handle.remove()
    return outputs[0][0]


@pytest.mark.parametrize("activation_memory", [None, 1], ids=["one pass", "two passes"])
@pytest.mark.parametrize(("algorithm", "scheme", "kind"), RUNS)
def test_it_is_the_error_of_the_finished_models(algorithm: str, scheme: str, kind: str, activation_memory: int | None) -> None:
    model, plain = quantized(algorithm, scheme, kind, activation_memory=activation_memory), quantized(None, scheme, kind)
    reference = last_output(tiny_model(kind=kind), kind)
    expected = [float(OutputError.of(last_output(m, kind), reference).relative.mean()) for m in (model, plain)]
    found = model.quark_report.model_error
    assert [found["error"], found["nearest_error"]] == pytest.approx(expected, rel=1e-3)
    assert found["tokens"] == TOKENS
    assert found["error"] < found["nearest_error"]
    assert not plain.quark_report.model_error
    assert not model.quark_report.does_harm


def test_a_rotated_model_is_compared_in_its_own_basis() -> None:
    made = config("rotation+gptq")
    for settings in made.algo_config:
        if hasattr(settings, "preset"):
            settings.preset = "reference"
    found = ModelQuantizer(made).quantize_model(tiny_model(), DATA).quark_report.model_error  # type: ignore[union-attr]
    assert 0 < found["error"] < found["nearest_error"] < 0.1


def test_a_run_from_disk_and_one_in_memory_measure_the_same(tmp_path: Path) -> None:
    reports = []

    def kept(finished: FinishedRun, *_: Any) -> None:
        reports.append(finished.report)

    quantize_checkpoint(tiny_model_dir("layernorm"), tmp_path / "out", config("gptq", kind="layernorm"), DATA, report=kept)
    in_memory = ModelQuantizer(config("gptq", kind="layernorm")).quantize_model(tiny_model(torch.bfloat16, kind="layernorm"), DATA)
    assert reports[0].model_error == in_memory.quark_report.model_error != {}  # type: ignore[union-attr]


class WithoutLargeCodes(Rounding):
    """Sets the largest tenth of each weight to 0, then rounds to nearest; this is worse in every layer."""

    def round(self, task: RoundingTask) -> Mapping[str, Any]:
        for layer in task.layers.values():
            weight: Any = layer.weight
            layer.weight = nn.Parameter(torch.where(weight.abs() > weight.abs().quantile(0.9), 0, weight), requires_grad=False)
        return RoundToNearest().round(task)


def test_an_algorithm_that_does_harm_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from quark_algos.gptq.gptq import ColumnRounding

    harmful = WithoutLargeCodes()
    monkeypatch.setattr(ColumnRounding, "round", lambda self, task: harmful.round(task))
    validated = quantized("gptq")
    assert not validated.quark_report.does_harm, "each layer is rounded to nearest instead"
    monkeypatch.setattr(rounding_validation, "is_worse", lambda *_: False)
    report = quantized("gptq").quark_report
    assert report.model_error["error"] > 2 * report.model_error["nearest_error"]
    assert report.does_harm
    assert next(report.lines()).startswith("The model is worse than rounded to nearest")


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, False),
        ({"error": 0.3, "nearest_error": 0.2, "standard_error": 0.04}, True),
        ({"error": 0.3, "nearest_error": 0.2, "standard_error": 0.06}, False),
        ({"error": None, "nearest_error": 0.2, "standard_error": None}, True),
        ({"error": 0.3, "nearest_error": 0.2, "standard_error": None}, False),
        ({"error": None, "nearest_error": None, "standard_error": None}, False),
    ],
)
def test_harm_is_more_than_two_standard_errors(figures: dict[str, Any], expected: bool) -> None:
    assert CalibrationReport(model_error=figures).does_harm is expected


def comparison(data: Sequence[Call], scheme: str = "int4_wo_64") -> ModelError:
    model = tiny_model(blocks=1)
    plan = make_plan(model, config(None, scheme), tiny_template().architecture)
    return ModelError.of(model, decoder_blocks(model, plan.architecture), data, plan.quantized)


def test_only_what_can_be_compared_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.ones(2, 512, dtype=torch.int64)
    (first, second) = comparison([Call((ids,))]).calls
    assert first.args[0].shape == second.args[0].shape == (1, 16)
    assert not comparison([Call((ids,))], "int8").calls, "a static scale of few tokens is not that of all"
    assert not comparison([Call((ids[:, :250],))]).calls, "too few tokens"
    assert not comparison([Call((), {"inputs_embeds": ids.float()})]).calls
    with monkeypatch.context() as both_ways:
        both_ways.setattr(LlamaForCausalLM, "can_generate", lambda self: False)
        assert not comparison([Call((ids,))]).calls
    monkeypatch.setattr(model_error, "MOST_TOKENS", 9)
    assert comparison([Call((ids,))]).calls[0].args[0].shape == (1, 9)


def test_token_ids_of_a_call_are_ids_alone_or_with_a_mask_of_two_axes() -> None:
    ids, mask = torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 1, 4, 4)
    assert ids_of(Call((ids,))) is ids
    assert ids_of(Call((), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})) is ids
    for call in (Call((ids,), {"attention_mask": mask}), Call((ids, ids)), Call((), {"labels": ids}), Call((ids.float(),)), Call()):
        assert ids_of(call) is None
