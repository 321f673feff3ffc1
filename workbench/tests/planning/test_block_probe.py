"""The seconds of a block, by the times of runs on one block, of the planned width or narrower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import quark_tiny_model as tiny
from quark.checkpoint.exporter import ExportOptions
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import architecture_of
from quark.runs.run import plan_run
from quark.torch import LLMTemplate
from quark_workbench.planning import block_probe as module
from quark_workbench.planning.block_probe import BlockSeconds, _extended, _of_one_block, _with_weights, measured_block, seconds_per_byte
from quark_workbench.planning.workload import Calibration, workload_of

CPU = torch.device("cpu")


def test_the_seconds_of_a_block_grow_with_tokens_where_a_phase_does() -> None:
    found = BlockSeconds({"load": 1.0, "forward": 2.0}, {"load": 0.0, "forward": 0.5}, 100)
    assert found.of(0) == {"load": 1.0, "forward": 2.0}
    assert found.of(10) == {"load": 1.0, "forward": 7.0}


def test_seconds_per_byte_are_those_of_the_part_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(1000))
    times = iter(range(100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(times)))
    monkeypatch.setattr(module, "_SECONDS", 60)
    assert seconds_per_byte(file) == pytest.approx(2 / 1000), "begin, one look at the clock within, end"


def measured(monkeypatch: pytest.MonkeyPatch, length: int = 256) -> tuple[BlockSeconds | None, list[tuple[int, int]]]:
    """Return the seconds of the tiny model's block where a phase takes 3 s and 10 ms for each token."""
    asked: list[tuple[int, int]] = []

    def seconds(one: Any, run: Any, count: int, length: int, *rest: Any) -> dict[str, float]:
        asked.append((count, length))
        tokens = count * length
        return {"forward": 3 + 0.01 * tokens, "load": 5.0 + 0.01 * tokens, **({"statistics": 0.02 * tokens} if count > 2 else {})}

    monkeypatch.setattr(module, "_seconds", seconds)
    model = tiny.tiny_model()
    run = plan_run(model, LLMTemplate.get("llama").get_config(scheme="int4_wo_32"))
    return measured_block(model, run, length, None, ExportOptions(), CPU), asked  # type: ignore[arg-type]


def test_two_lengths_of_data_tell_what_a_token_takes_from_what_a_block_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = measured(monkeypatch)
    assert asked == [(1, 256), (2, 256), (6, 256)]
    assert found is not None
    assert found.per_token == pytest.approx({"forward": 0.01, "load": 0.0, "statistics": 0.02 * 6 / 4})
    assert found.fixed == pytest.approx({"forward": 3.0, "load": 5 + 0.01 * 512, "statistics": 0.0})
    blocks = decoder_blocks(tiny.tiny_model(), architecture_of(tiny.tiny_model()))
    assert found.size == sum(p.nbytes for p in blocks[0].module.parameters())
    assert found.measured_share == 1


@pytest.mark.parametrize("budget", [0.0, 1e9])
def test_the_seconds_of_a_narrower_block_are_scaled_by_its_work(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds that are sums of FLOPs, bytes and a constant: scaled ones are those of the block itself."""

    def seconds(one: Any, run: Any, count: int, length: int, *rest: Any) -> dict[str, float]:
        work = workload_of(one.model, plan_run(one.model, one.config), Calibration(count, length))
        size = sum(p.nbytes for p in one.model.model.layers.parameters())
        return {
            "forward": 1e-9 * work.forward,
            "statistics": 1e-9 * work.statistics,
            "solve": 1e-9 * work.solver + 1e-6 * size,
            "write": 3 + 1e-6 * size,
        }

    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setattr(module, "_BUDGET", budget)
    config = AutoConfig.for_model("llama", hidden_size=2048, intermediate_size=5632, num_hidden_layers=2, vocab_size=64)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    run = plan_run(model, LLMTemplate.get("llama").get_config(scheme="int4_wo_128", algorithm="gptq"))
    found = measured_block(model, run, 256, None, ExportOptions(), CPU)  # type: ignore[arg-type]
    assert found is not None
    assert (found.measured_share == 1) == (budget > 0)
    work, blocks = workload_of(model, run, Calibration(10, 256)), 2
    assert found.of(2560) == pytest.approx(
        {
            "forward": 1e-9 * work.forward / blocks,
            "statistics": 1e-9 * work.statistics / blocks,
            "solve": 1e-9 * work.solver / blocks + 1e-6 * found.size,
            "write": 3 + 1e-6 * found.size,
        }
    )


@pytest.mark.parametrize(
    ("work", "known", "seconds"),
    [
        ((8.0, 1.0), [((2.0, 1.0), 3.0)], 12.0),
        ((8.0, 1.0), [((2.0, 1.0), 5.0), ((1.0, 1.0), 3.0)], 2 * 8 + 1),
        ((8.0, 1.0), [((2.0, 1.0), 5.0), ((1.0, 1.0), 1.0)], 20.0),
        ((8.0, 4.0), [((2.0, 2.0), 5.0), ((1.0, 1.0), 3.0)], 20.0),
        ((8.0, 1.0), [((2.0, 1.0), 5.0), ((1.0, 1.0), 7.0)], 5.0),
        ((0.0, 0.0), [((0.0, 0.0), 5.0), ((0.0, 0.0), 5.0)], 5.0),
    ],
    ids=["one amount", "with a constant", "a negative constant", "one ratio", "seconds that shrink", "no work"],
)
def test_seconds_are_extended_by_two_numbers_neither_of_which_saves_time(work: Any, known: Any, seconds: float) -> None:
    assert _extended(work, *known) == pytest.approx(seconds)


@pytest.mark.parametrize(("length", "used"), [(8, 128), (4096, 512), (300, 300)])
def test_a_measurement_takes_sequences_neither_short_nor_long(length: int, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {length for _, length in measured(monkeypatch, length)[1]} == {used}


def test_a_model_of_one_block_has_a_small_vocabulary_and_the_layers_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_VOCABULARY", 128)
    model: Any = tiny.tiny_model(torch.bfloat16)
    before = {name: p.clone() for name, p in model.named_parameters()}
    blocks = decoder_blocks(model, architecture_of(model))
    small: Any = _with_weights(_of_one_block(model, blocks[0]), CPU)
    assert small.config.num_hidden_layers == 1 < model.config.num_hidden_layers
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in small.named_parameters()}
    inner = {n: (tuple(p.shape), p.dtype) for n, p in model.named_parameters() if ".layers." not in n or ".layers.0." in n}
    hidden = model.config.hidden_size
    changed = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {name: shape for name, shape in shapes.items() if name not in changed} == {n: s for n, s in inner.items() if n not in changed}
    assert all(shapes[name] == ((128, hidden), torch.bfloat16) for name in changed & set(shapes))
    assert all(not p.requires_grad and not p.is_meta for p in small.parameters())
    with torch.no_grad():
        logits = small(torch.arange(8)[None]).logits
    assert logits.shape == (1, 8, 128)
    assert bool(logits.isfinite().all())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
