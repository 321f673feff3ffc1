"""Listeners get the events of a run, in their order and with their figures.

A resumed run gives the same events.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import quark_tiny_model as tiny
from quark.plugins import BlockFinished, Event, Exported, PhaseStarted, RunPlanned, RunStarted, listening
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_workbench.evaluate.by_block import likelihood_by_block
from quark_workbench.evaluate.logits import windows_of
from quark_workbench.mixed_precision import Budget, select_schemes

IDS = [torch.arange(3, 19)[None], torch.arange(30, 46)[None]]
BLOCKS = [f"model.layers.{i}" for i in range(3)]


def heard_of(work: Any) -> list[Event]:
    heard: list[Event] = []
    with listening(heard.append):
        work()
    return heard


@pytest.mark.parametrize(("scheme", "algorithm", "samples"), [("int4_wo_64", None, 0), ("fp8", None, 2), ("int4_wo_64", "gptq", 2)])
def test_a_run_says_when_it_begins_counts_its_finished_blocks_and_says_when_it_ends(
    scheme: str, algorithm: str | None, samples: int
) -> None:
    config = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=algorithm)
    heard = heard_of(lambda: ModelQuantizer(config).quantize_model(tiny.tiny_model(), IDS))
    started, planned = heard[0], next(event for event in heard if isinstance(event, RunPlanned))
    assert isinstance(started, RunStarted)
    assert (started.source, started.scheme, started.algorithms) == ("LlamaForCausalLM", scheme, (algorithm,) if algorithm else ())
    assert (planned.blocks, planned.layers, planned.samples, planned.tokens) == (3, 21, samples, 16 * samples)
    steps = [event.name for event in heard if event.name not in ("phase_started", "warning")]
    assert steps == ["run_started", "run_planned", *["block_started", "block_finished"] * 3, "run_finished"]
    finished = [event for event in heard if isinstance(event, BlockFinished)]
    assert [(event.block, event.number, event.total, event.outcome) for event in finished] == [
        (name, i + 1, 3, "done") for i, name in enumerate(BLOCKS)
    ]
    assert all(event.seconds_left is not None for event in finished)
    assert finished[-1].seconds_left == 0
    for event in finished:
        assert {"load", "solve", "report"} <= event.phases.keys()
        assert 0 < event.seconds < event.elapsed
        assert event.figures["layers"] == 7
        assert str(event.figures["worst"]).startswith(event.block)
        assert event.figures["worst_snr_db"] <= event.figures["snr_db"]


def test_phases_are_told_inside_their_block() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm="gptq")
    heard = heard_of(lambda: ModelQuantizer(config).quantize_model(tiny.tiny_model(), IDS))
    phases = [(event.block, event.phase) for event in heard if isinstance(event, PhaseStarted)]
    assert phases[0] == (None, "plan")
    for block in BLOCKS:
        assert {"load", "forward", "statistics", "solve", "write"} <= {phase for own, phase in phases if own == block}


def test_a_run_from_disk_tells_of_the_report_and_the_export_and_a_resumed_one_of_finished_blocks(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm="gptq")
    out = tmp_path / "out"

    def stop(event: Event) -> None:
        if isinstance(event, BlockFinished) and event.number == 2:
            raise KeyboardInterrupt  # what a listener raises is no error of the run, but Ctrl-C ends it

    with listening(stop), pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tiny.tiny_model_dir(), out, config, IDS)
    heard = heard_of(lambda: quantize_checkpoint(tiny.tiny_model_dir(), out, config, IDS, resume=True))
    finished = [event for event in heard if isinstance(event, BlockFinished)]
    assert [event.outcome for event in finished] == ["resumed", "resumed", "done"]
    assert [event.seconds_left for event in finished] == [None, None, 0]
    (exported,) = [event for event in heard if isinstance(event, Exported)]
    files = [file for file in out.iterdir() if file.is_file()]
    assert (exported.path, exported.files) == (str(out), len(files))
    assert exported.bytes == sum(file.stat().st_size for file in files)


def test_an_export_of_a_model_in_memory_is_a_run_of_its_own(tmp_path: Path) -> None:
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_64")).quantize_model(tiny.tiny_model())
    heard = heard_of(lambda: export_safetensors(model, tmp_path / "out"))
    assert [(event.task, event.name) for event in heard] == [
        ("export", name) for name in ("run_started", "phase_started", "exported", "run_finished")
    ]


def test_an_evaluation_by_block_has_the_blocks_of_a_float_model_one_after_another() -> None:
    heard = heard_of(lambda: likelihood_by_block(tiny.tiny_model_dir(), windows_of([torch.arange(3, 19)[None]])))
    assert [event.block for event in heard if isinstance(event, BlockFinished)] == BLOCKS


@pytest.mark.parametrize("sensitivity", ["fisher", "output"])
def test_a_selection_says_how_far_it_is(sensitivity: str) -> None:
    options = {"sensitivity": sensitivity, "points": 2, "measured_tokens": 16}
    heard = heard_of(lambda: select_schemes(tiny.tiny_model(), ["fp8", "mxfp4"], Budget(bits=6), IDS, selector_options=options))
    assert {event.task for event in heard} == {"select"}
    assert [event.phase for event in heard if isinstance(event, PhaseStarted)] == ["plan", "data", "select"]
    kinds = {event.name for event in heard}
    assert "block_finished" in kinds
    assert ("batch_finished" in kinds) == (sensitivity == "fisher")


@pytest.mark.parametrize(("algorithm", "first"), [("gptq", ["plan", "data"]), (None, ["plan", "load"])])
def test_data_that_are_read_when_they_are_needed_have_a_phase_before_the_first_block(
    algorithm: str | None, first: list[str], tmp_path: Path
) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm=algorithm)
    heard = heard_of(lambda: quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "out", config, lambda wanted_by: IDS))
    phases = [event.phase for event in heard if isinstance(event, PhaseStarted)]
    assert phases[:2] == first
    assert phases.count("data") == (algorithm is not None)


def test_a_block_has_the_work_of_its_forwards_and_statistics() -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_64", algorithm="gptq")
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(tiny.tiny_model(), tiny.calibration_batches(4, 64))
    for block in model.model.layers:
        linear = [module for name, module in block.named_modules() if name.endswith("_proj")]
        size = sum(module.weight.numel() for module in linear)
        assert len(linear) == 7
    rows = [row for name, row in model.quark_report.blocks.items() if name.startswith("model.layers.")]
    assert len(rows) == len(model.model.layers)
    assert [row["flops"]["forward"] for row in rows] == [2 * 4 * 64 * size] * len(rows)
    assert all(row["flops"]["statistics"] > 0 for row in rows)


def test_a_run_without_data_has_no_work_of_forwards() -> None:
    model = ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_64")).quantize_model(tiny.tiny_model())
    assert not any("flops" in row for row in model.quark_report.blocks.values())
