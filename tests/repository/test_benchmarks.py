"""``make bench``: what runs, what is left out, what becomes of one that fails, and which figures are held to which bars."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import calibrated, mixed_precision, peers
from benchmarks.peer_programs import measuring
from benchmarks.perplexity import sequences
from benchmarks.results import Measurement
from quark_tiny_model import tiny_model
from quark_workbench.evaluate import compare


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_every_benchmark_is_a_function_of_arguments(name: str) -> None:
    module, _, function = bench.BENCHMARKS[name][0].partition(":")
    assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), function))


def test_one_that_fails_or_lacks_a_model_does_not_lose_the_figures_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(arguments: list[str]) -> list[Measurement]:
        raise SystemExit("its interpreter ended")

    monkeypatch.setattr("benchmarks.startup.main", lambda arguments: [Measurement("start-up", "one", 2, "×", "import x", 3)])
    monkeypatch.setattr("benchmarks.formats.main", failing)
    with pytest.raises(SystemExit, match="failed: formats"):
        bench.main(["--results", str(tmp_path / "results.json"), "--only", "formats,rtn,startup"])
    (run,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["runs"]
    assert [one["case"] for one in run["measurements"]] == ["one"]
    assert "rtn does not run" in capsys.readouterr().out


def test_one_that_measures_one_thread_leaves_all_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = torch.get_num_threads(), []

    def measured(arguments: list[str]) -> list[Measurement]:
        threads.append(torch.get_num_threads())
        torch.set_num_threads(1)
        return []

    monkeypatch.setattr("benchmarks.startup.main", measured)
    monkeypatch.setattr("benchmarks.formats.main", measured)
    torch.set_num_threads(2)
    try:
        bench.main(["--only", "startup,formats"])
    finally:
        torch.set_num_threads(before)
    assert threads == [2, 2]


def test_arguments_are_passed_on() -> None:
    args = bench.parser().parse_args(["--model", "m", "--text", "t", "--amd-quark", "python"])
    assert bench.BENCHMARKS["peers"][1](args) == ["m", "t", "--amd-quark", "python"]
    assert bench.BENCHMARKS["formats"][1](args) == ["--reference", "python"]
    assert bench.BENCHMARKS["ranks"][1](args) == ["m", "t/foldoc.txt", "--repeats", "1", "--calls", "8"]
    assert bench.BENCHMARKS["mixed"][1](bench.parser().parse_args(["--model", "m"])) is None


def test_calibrated_runs_are_held_to_forwards_to_a_busy_process_and_to_accuracy() -> None:
    run = {"algorithm": "awq+gptq+tuning", "scheme": "int4_wo_64", "ratio": 16, "busy_ratio": 1.5, "perplexity": 33, "mean_kl": 0.15}
    met = {one.benchmark: (one.bar, one.is_met) for one in calibrated.measurements([run])}
    assert met == {
        "calibrated rounding": (15, False),
        "calibrated rounding: beside a busy process": (1.6, True),
        "accuracy: perplexity": (33.8, True),
        "accuracy: divergence": (0.14, False),
    }
    (plain,) = calibrated.measurements([{"algorithm": "gptq", "scheme": "mxfp4", "ratio": 16}])
    assert plain.bar is None


def test_runs_in_seconds_of_one_thread_have_bars_of_their_own() -> None:
    run = {"algorithm": "none", "scheme": "int8", "ratio": 1.02, "one_thread": True}
    (found,) = calibrated.measurements([run])
    assert (found.benchmark, found.bar, found.is_met) == ("calibrated rounding: CPU seconds of one thread", 1.0, False)
    (found,) = calibrated.measurements([{**run, "dtype": "bfloat16"}])
    assert (found.benchmark, found.bar) == ("calibrated rounding: CPU seconds of one thread, bfloat16", 1.1)
    assert found.floor == "one bfloat16 forward over the calibration tokens"


def row(choice: str, names: list[str], target: float, kl: float, bits: float = 0) -> dict[str, Any]:
    return {"choice": choice, "candidates": names, "target": target, "kl": kl, "bits": bits}


def test_a_choice_is_compared_with_the_best_scheme_of_at_most_its_size_and_with_the_heuristic() -> None:
    alone = [row("uniform", [name], 0, kl, bits) for name, kl, bits in (("a", 0.1, 8), ("b", 0.4, 5), ("c", 0.5, 4))]
    rows = [*alone, row("ends", ["a", "c"], 5, 0.8), row("fisher", ["a", "c"], 5, 0.2)]
    assert [(one.value, one.bar) for one in mixed_precision.measurements(rows)] == [(0.5, 1), (0.25, 1)]


def test_what_other_programs_measure_of_a_model_is_what_quark_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, reference = tiny_model(), tiny_model()
    tokens = torch.randint(200, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    monkeypatch.setattr(peers, "load_tokenizer", lambda path: None)
    monkeypatch.setattr(peers, "load_model", lambda *_: reference)
    monkeypatch.setattr(peers, "windows", lambda *_: tokens)
    peers.write_tokens(Path("model"), Path("texts"), str(tmp_path))
    figures = measuring.accuracy(model, str(tmp_path))
    expected = compare(model, reference, [tokens, tokens])
    assert figures == pytest.approx(
        {
            "perplexity": expected.perplexity,
            "float_perplexity": expected.reference_perplexity,
            "mean_kl": expected.mean_kl,
            "top1": expected.top1_agreement,
        },
        rel=1e-5,
    )


def test_windows_of_tokens_are_those_of_the_other_benchmarks_behind_the_tokens_that_begin_a_text(tmp_path: Path) -> None:
    class Tokenizer:
        begin: list[int] = []

        def __call__(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None) -> dict[str, Any]:
            tokens = [*self.begin * add_special_tokens, *map(ord, text)]
            return {"input_ids": torch.tensor([tokens]) if return_tensors else tokens}

    (tmp_path / "text.txt").write_text("".join(chr(97 + i % 23) for i in range(40_000)), encoding="utf-8")
    tokenizer = Tokenizer()
    plain = peers.windows(tokenizer, tmp_path / "text.txt", 7)
    assert torch.equal(plain, sequences(tokenizer, tmp_path / "text.txt", 7, 8, 512))
    tokenizer.begin = [2]
    begun = peers.windows(tokenizer, tmp_path / "text.txt", 7)
    assert begun.shape == plain.shape
    assert (begun[:, 0] == 2).all()
    assert torch.equal(begun[:, 1:].flatten(), plain.flatten()[: 8 * 511])


def peer_row(program: str, algorithm: str, cpu: float, perplexity: float) -> dict[str, Any]:
    figures = {"version": "1", "cpu": cpu, "forward_cpu": 2.0, "perplexity": perplexity}
    return {"model": "m", "program": program, "algorithm": algorithm, "scheme": "int4_wo_64", **figures}


def test_runs_of_other_programs_are_kept_one_by_one_and_not_done_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = []

    def fake(python: str, script: str, arguments: list[str], limit: float) -> dict[str, Any] | None:
        done.append((python, script, *arguments[1:3]))
        return None if script == "llm_compressor" else {"version": "1", "cpu": 4.0, "forward_cpu": 2.0, "perplexity": 40.0}

    monkeypatch.setattr(peers, "run", fake)
    monkeypatch.setattr(peers, "load_tokenizer", lambda path: None)
    monkeypatch.setattr(peers, "windows", lambda *_: torch.zeros(1, 4, dtype=torch.int64))
    monkeypatch.setattr(peers, "load_model", lambda *_: tiny_model(blocks=1))
    out = tmp_path / "peers.json"
    command = ["m", str(tmp_path), "--llm-compressor", "other", "--auto-round", "round", "--out", str(out)]
    peers.main([*command, "--runs", "gptq/int4_wo_64,autoround/mxfp4", "--programs", "quark,llm-compressor,auto-round"])
    ours = [(sys.executable, "amd_quark", "gptq", "int4_wo_64"), (sys.executable, "amd_quark", "autoround", "mxfp4")]
    theirs = [("other", "llm_compressor", "gptq", "int4_wo_64"), ("other", "llm_compressor", "autoround", "mxfp4")]
    assert done == [ours[0], theirs[0], ours[1], theirs[1], ("round", "intel_auto_round", "autoround", "mxfp4")]
    done.clear()
    peers.main([*command, "--runs", "gptq/int4_wo_64,autoround/mxfp4", "--programs", "quark,llm-compressor,auto-round"])
    assert done == theirs
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(row["program"], row["algorithm"], row["scheme"]) for row in rows] == [
        ("quark", "gptq", "int4_wo_64"),
        ("quark", "autoround", "mxfp4"),
        ("auto-round", "autoround", "mxfp4"),
    ]


def test_tuning_is_held_to_the_perplexity_of_auto_round_in_a_fifth_of_its_time() -> None:
    rows = [peer_row("quark", "awq+gptq+tuning", 60, 34), peer_row("auto-round", "autoround", 200, 35), peer_row("quark", "gptq", 3, 40)]
    assert [(one.value, one.bar) for one in peers.measurements(rows)] == [(30, 20), (34, 35), (100, None), (35, None), (1.5, 2), (40, None)]
