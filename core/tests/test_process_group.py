"""Several processes that torchrun starts: their output has the bytes of one, and when one fails all stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from quark.checkpoint.atomic_directory import finished_blocks
from quark.errors import ConfigError
from quark.process_group import ranks_of_environment
from quark.ranks import ALONE
from quark.runs.block_figures import OUTSIDE
from quark.testing.tiny import tiny_model_dir
from quark.testing.whole_runs import contents

CPU = torch.device("cpu")
CALIBRATED = ("--calib", str(tiny_model_dir() / "held_out.txt"), "--num-calib", "7", "--seq-len", "48", "--deterministic")
SHARDS = ("--exporter-option", "max_shard_bytes=300000")
RUNS: dict[str, tuple[str, ...]] = {
    "rtn": ("--scheme", "int4_wo_64", *SHARDS),
    "gptq": ("--scheme", "int4_wo_64", "--algorithm", "gptq", *CALIBRATED, *SHARDS),
    "awq": ("--scheme", "int4_wo_64", "--algorithm", "awq", *CALIBRATED),
    "awq and gptq": ("--scheme", "int4_wo_64", "--algorithm", "awq", "--algorithm", "gptq", *CALIBRATED),
    "static": ("--scheme", "fp8", "--algorithm", "smoothquant", "--kv-cache", "fp8", *CALIBRATED),
    "rotation": ("--scheme", "int4_wo_64", "--algorithm", "rotation", *CALIBRATED),
}
FAILING = """
import os, signal, sys, time
from quark.cli.main import main
from quark.runs import quantize_block as module

how, rank, log = sys.argv[1:4]
del sys.argv[1:4]
plain = module.quantize_block

def failing(pipeline, block, *rest):
    if block.name.endswith("1") and os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        with open(log, "w") as file:
            file.write(str(time.time()))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("disk on fire")
    return plain(pipeline, block, *rest)

module.quantize_block = failing
main()
"""


def started(ranks: int, *command: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a module or a script by so many processes of one thread each."""
    many = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        if ranks > 1
        else []
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *many, *command], env=environment, capture_output=True, text=True, timeout=280, check=False)


@cache
def by_one(name: str, directory: Path) -> dict[str, bytes]:
    return quantized(1, name, directory / "one")


def quantized(ranks: int, name: str, out: Path, *more: str) -> dict[str, bytes]:
    process = started(ranks, "-m", "quark", "quantize", str(tiny_model_dir()), str(out), *RUNS[name], "--no-report", *more)
    assert process.returncode == 0, process.stderr[-3000:]
    return contents(out)


def assert_same(name: str, ranks: int, directory: Path) -> None:
    one, many = by_one(name, directory), quantized(ranks, name, directory / "many")
    assert sorted(one) == sorted(many)
    assert [file for file in one if one[file] != many[file]] == []


@pytest.mark.parametrize("name", ["rtn", "gptq"])
def test_two_processes_write_the_bytes_of_one(name: str, tmp_path: Path) -> None:
    assert_same(name, 2, tmp_path)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2, "several files, to which both write"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", RUNS)
def test_processes_write_the_bytes_of_one(name: str, ranks: int, tmp_path: Path) -> None:
    assert_same(name, ranks, tmp_path)


def failed(how: str, rank: int, directory: Path) -> tuple[str, float]:
    """Run two processes of which one fails in the middle; returns what they said, and how many seconds later all had stopped."""
    script, log, place = directory / "failing.py", directory / "failed_at", directory / "place"
    script.write_text(FAILING)
    place.mkdir()
    process = started(2, str(script), how, str(rank), str(log), "quantize", str(tiny_model_dir()), str(place / "out"), *RUNS["gptq"])
    assert process.returncode != 0
    assert not (place / "out").exists()
    (partial,) = place.iterdir()
    assert finished_blocks(partial) == 1, "block 0 stays for --resume"
    return process.stderr, time.time() - float(log.read_text())


def test_an_error_of_one_process_stops_all_and_the_first_says_which_and_why(tmp_path: Path) -> None:
    said, seconds = failed("raise", 1, tmp_path)
    assert "quark (rank 1): ValueError: disk on fire" in said
    assert "quark: rank 1 of 2 has stopped: ValueError: disk on fire" in said
    assert seconds < 60


def test_a_process_that_is_killed_stops_all(tmp_path: Path) -> None:
    said, seconds = failed("kill", 1, tmp_path)
    assert "exitcode: -9" in said
    assert seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_so_it_is_where_the_first_process_fails(how: str, tmp_path: Path) -> None:
    said, seconds = failed(how, 0, tmp_path)
    assert ("exitcode: -9" if how == "kill" else "quark: ValueError: disk on fire") in said
    assert seconds < 60


@pytest.mark.slow
def test_torchrun_starts_all_again_where_it_is_told_to(tmp_path: Path) -> None:
    script, out = tmp_path / "failing.py", tmp_path / "many"
    script.write_text(FAILING)
    command = [str(script), "kill", "0", str(tmp_path / "failed_at"), "quantize", str(tiny_model_dir()), str(out), *RUNS["gptq"]]
    process = started(2, *command, "--resume", "--no-report", restarts=1)
    assert process.returncode == 0, process.stderr[-3000:]
    assert (tmp_path / "failed_at").exists()
    assert contents(out) == by_one("gptq", tmp_path)


def test_one_process_goes_on_from_what_two_have_left_and_the_first_alone_writes_the_report(tmp_path: Path) -> None:
    failed("raise", 1, tmp_path)
    out = tmp_path / "place" / "out"
    process = started(1, "-m", "quark", "quantize", str(tiny_model_dir()), str(out), *RUNS["gptq"], "--resume")
    assert process.returncode == 0, process.stderr[-3000:]
    many = quantized(2, "gptq", tmp_path / "many")
    assert {name: data for name, data in contents(out).items() if not name.startswith("quark_report")} == many
    reported = started(2, "-m", "quark", "quantize", str(tiny_model_dir()), str(tmp_path / "reported"), *RUNS["rtn"])
    assert reported.returncode == 0, reported.stderr[-3000:]
    report = json.loads((tmp_path / "reported" / "quark_report.json").read_text())
    names = [block["block"] for block in report["time"]["blocks"]]
    assert names == [*report["model"]["blocks"], OUTSIDE], "blocks of both ranks, in order"


def test_a_process_that_torchrun_has_not_started_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with ranks_of_environment(CPU) as (ranks, device):
        assert (ranks.rank, ranks.size, ranks.is_deterministic, device) == (0, 1, ALONE.is_deterministic, CPU)


def test_an_incomplete_environment_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT is not: start the processes with `torchrun"),
        ranks_of_environment(CPU),
    ):
        pass


def test_one_gpu_for_all_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="'cuda:1' would be that of all processes"), ranks_of_environment(torch.device("cuda:1")):
        pass
