"""Several processes that torchrun starts: their output has the bytes of one, and when one fails all stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from quark.base.ranks import ALONE
from quark.checkpoint.atomic_directory import finished_blocks
from quark.errors import ConfigError, RankError
from quark.runs.run_figures import OUTSIDE
from quark_devkit.whole_runs import contents
from quark_tiny_model import tiny_model_dir
from quark_workbench import process_group
from quark_workbench.process_group import _ProcessGroup, is_one_of_many, ranks_of_environment

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
PLAIN = """
from quark_workbench.cli.main import main

try:
    main()
except SystemExit as stop:  # which torchrun takes for a failure in a process that it has forked, whatever its code
    if stop.code:
        raise
"""
FAILING = (
    """
import os, signal, sys, time
from pathlib import Path
from quark.checkpoint.atomic_directory import finished_blocks
from quark.runs import quantize_block as module

how, rank, log = sys.argv[1:4]
del sys.argv[1:4]
place = Path(sys.argv[3]).parent
plain = module.quantize_block

def failing(started, sink, block, *rest):
    if block.name.endswith("1") and os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        while not any(map(finished_blocks, place.glob(".*.partial"))):  # the first process may still be storing block 0
            time.sleep(0.01)
        with open(log, "w") as file:
            file.write(str(time.time()))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("disk on fire")
    return plain(started, sink, block, *rest)

module.quantize_block = failing
"""
    + PLAIN
)


class Processes:
    """Runs of scripts by one process or several (`forked_processes`), forked from a program with imports."""

    def __init__(self, program: subprocess.Popen[str], directory: Path) -> None:
        self._program = program
        self._output = directory / "output"
        self._directory = directory
        self._contents: dict[tuple[int, str], dict[str, bytes]] = {}

    def run(self, ranks: int, script: str, *arguments: object, restarts: int = 0) -> tuple[int, str]:
        """Return the exit code of a script, and the output of all its processes."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        file = self._directory / "script.py"
        file.write_text(script)
        job = {"ranks": ranks, "restarts": restarts, "script": str(file), "arguments": [*map(str, arguments)], "output": str(self._output)}
        self._program.stdin.write(json.dumps(job) + "\n")
        self._program.stdin.flush()
        return int(self._program.stdout.readline()), self._output.read_text()

    def quantize(self, ranks: int, name: str, out: Path, *more: str, report: str | None = "--no-report") -> dict[str, bytes]:
        """Quantize the tiny model, and return the contents of the checkpoint."""
        code, said = self.run(ranks, PLAIN, "quantize", tiny_model_dir(), out, *RUNS[name], *([report] if report else []), *more)
        assert code == 0, said[-3000:]
        return contents(out)

    def checkpoint(self, ranks: int, name: str) -> dict[str, bytes]:
        """Return the contents of the checkpoint that ``ranks`` processes write, quantized once."""
        if (ranks, name) not in self._contents:
            self._contents[ranks, name] = self.quantize(ranks, name, self._directory / f"{name} by {ranks}")
        return self._contents[ranks, name]

    def fail(self, how: str, rank: int, directory: Path) -> tuple[str, float, Path]:
        """Run two processes, and let one of them fail in the middle.

        Returns what they said, how many seconds later all had stopped, and where the output would have been.
        """
        log, out = directory / "failed_at", directory / "place" / "out"
        out.parent.mkdir()
        code, said = self.run(2, FAILING, how, rank, log, "quantize", tiny_model_dir(), out, *RUNS["gptq"])
        seconds = time.time() - float(log.read_text())
        assert code != 0
        assert not out.exists()
        (partial,) = out.parent.iterdir()
        assert finished_blocks(partial) == 1, "block 0 stays for --resume"
        return said, seconds, out


FORKS = pytest.mark.posix("the processes of these tests are forks")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    command = [sys.executable, str(Path(__file__).with_name("forked_processes.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as program:
        yield Processes(program, tmp_path_factory.mktemp("processes"))
        assert program.stdin is not None
        program.stdin.close()


def different(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """The names of files that are not in both with the same bytes."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


@FORKS
def test_two_processes_write_the_bytes_of_one(processes: Processes) -> None:
    many = processes.checkpoint(2, "gptq")
    assert not different(many, processes.checkpoint(1, "gptq"))
    assert len([name for name in many if name.endswith(".safetensors")]) > 2, "several files, to which both write"


@FORKS
@pytest.mark.slow
def test_so_they_do_as_programs_that_torchrun_starts_and_the_first_alone_writes_the_report(processes: Processes, tmp_path: Path) -> None:
    out = tmp_path / "many"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "quark", "quantize", str(tiny_model_dir()), str(out), *RUNS["rtn"]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    many = contents(out)
    report = json.loads(many.pop("quark_report.json"))
    assert many.pop("quark_report.html")
    assert not different(many, processes.checkpoint(1, "rtn"))
    names = [block["block"] for block in report["time"]["blocks"]]
    assert names == [*report["model"]["blocks"], OUTSIDE], "blocks of both ranks, in order"


@FORKS
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", RUNS)
def test_processes_write_the_bytes_of_one(name: str, ranks: int, processes: Processes) -> None:
    assert not different(processes.checkpoint(ranks, name), processes.checkpoint(1, name))


@FORKS
@pytest.mark.thorough
def test_an_error_of_one_process_stops_all_the_first_says_which_and_why_and_one_process_goes_on(
    processes: Processes, tmp_path: Path
) -> None:
    said, seconds, out = processes.fail("raise", 1, tmp_path)
    assert "quark (rank 1): ValueError: disk on fire" in said
    assert "quark: rank 1 of 2 has stopped: ValueError: disk on fire" in said
    assert seconds < 60
    assert not different(processes.quantize(1, "gptq", out, "--resume"), processes.checkpoint(2, "gptq"))


@FORKS
@pytest.mark.thorough
def test_a_process_that_is_killed_stops_all(processes: Processes, tmp_path: Path) -> None:
    said, seconds, _ = processes.fail("kill", 1, tmp_path)
    assert "exitcode: -9" in said
    assert seconds < 60


@FORKS
@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_so_it_is_where_the_first_process_fails(how: str, processes: Processes, tmp_path: Path) -> None:
    said, seconds, _ = processes.fail(how, 0, tmp_path)
    assert ("exitcode: -9" if how == "kill" else "quark: ValueError: disk on fire") in said
    assert seconds < 60


@FORKS
@pytest.mark.slow
def test_torchrun_starts_all_again_where_it_is_told_to(processes: Processes, tmp_path: Path) -> None:
    out, log = tmp_path / "many", tmp_path / "failed_at"
    command = ["kill", "0", log, "quantize", tiny_model_dir(), out, *RUNS["gptq"], "--resume", "--no-report"]
    code, said = processes.run(2, FAILING, *command, restarts=1)
    assert code == 0, said[-3000:]
    assert log.exists()
    assert not different(contents(out), processes.checkpoint(1, "gptq"))


def test_a_rank_that_stops_tells_the_others_its_number_and_why() -> None:
    store = HashStore()
    _ProcessGroup(1, 3, store).report(ValueError("disk on fire"))
    assert store.get("error") == b"rank 1 of 3 has stopped: ValueError: disk on fire"


class _Gone:
    """The store of a first rank that has been killed."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("failed to recv, got 0 bytes")


@pytest.mark.parametrize(("store", "is_told"), [(HashStore(), True), (_Gone(), False)], ids=["the first rank lives", "it is gone"])
def test_a_rank_tells_what_has_happened_unless_the_first_does(store: Any, is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_PATIENCE", 0.2)
    error = _ProcessGroup(1, 2, store)._cause(RuntimeError("Connection closed by peer"))
    assert error.is_told is is_told
    assert "another process of this run ended without a message" in str(error)


ALONE_IN_THE_END = """
import os, sys, torch
from quark_workbench.process_group import ranks_of_environment
from quark_workbench.cli import main
try:
    with ranks_of_environment(torch.device("cpu")) as (ranks, _):
        ranks.barrier()
        if ranks.is_first:
            os._exit(9)
        ranks.barrier()
except Exception as error:
    main._print_error(error)
    sys.exit(2)
"""


@pytest.mark.thorough
def test_a_rank_whose_first_rank_is_killed_says_so_in_a_sentence() -> None:
    """As batch systems start processes, without torchrun, whose store would outlive them."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", ALONE_IN_THE_END]
    ranks = [subprocess.Popen(command, env={**common, "RANK": rank}, stderr=subprocess.PIPE, text=True) for rank in "01"]
    said = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [9, 2], said[1]
    assert "quark (rank 1): another process of this run ended without a message" in said[1]


def test_a_rank_that_waits_for_others_says_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "_SILENCE", 0.1)
    monkeypatch.setattr(process_group, "TIMEOUT", timedelta(seconds=2))
    with pytest.raises(RankError, match="cannot connect to") as caught, ranks_of_environment(CPU):
        pass
    assert not caught.value.is_told
    assert f"Rank 1 waits at 127.0.0.1:{port} until all 2 processes of this run have started" in caplog.text


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
        pytest.raises(ConfigError, match="are set, but not MASTER_ADDR and MASTER_PORT: start the processes with `torchrun"),
        ranks_of_environment(CPU),
    ):
        pass


def test_one_gpu_for_all_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="all processes would use the device 'cuda:1'"), ranks_of_environment(torch.device("cuda:1")):
        pass


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"WORLD_SIZE": "2", "RANK": "1"}, True),
        ({"WORLD_SIZE": "2"}, False),  # batch systems set it for their own purposes
        ({"RANK": "0"}, False),
        ({"WORLD_SIZE": "1", "RANK": "0"}, False),
    ],
)
def test_a_process_is_one_of_many_if_torchrun_has_told_it_its_number(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_one_of_many() is expected
