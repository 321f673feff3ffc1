"""A program that runs `quantize_checkpoint` in processes that are killed, or whose disk fails.

`test_killed_runs` and `test_failing_disks` start the program and send it jobs.

The program reads a job from each line of its standard input, as JSON, and runs the job in a fork of itself.
It answers with the exit code of the fork: `REFUSED` for an error of quark's own, 1 for any other error, and
neither of these nor 0 if the fork was killed. A fork starts with everything imported and with a single
thread. If the system has no forks, a new process runs the job.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - imported once, and not in every fork

from quark.base import files
from quark.calibration.report import CalibrationReport
from quark.checkpoint import ExportOptions
from quark.errors import QuarkError
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate

plain_pwrite = files.pwrite
REFUSED = 3
OPERATIONS = ("open", "ftruncate", "fsync", "fdatasync", "mkdir", "rename", "link")
"""Functions of `os` that use a disk or wait for it."""
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # SIGTERM ends a process on Windows at once


def killed_after(allowed: int) -> Any:
    """Return a ``pwrite`` that kills the process after a number of bytes, in the middle of a call."""
    left = allowed

    def pwrite(file: int, data: Any, offset: int) -> int:
        nonlocal left
        count = memoryview(data).nbytes
        if count >= left:
            plain_pwrite(file, memoryview(data).cast("B")[:left], offset)
            os.kill(os.getpid(), KILL)
        left -= count
        return plain_pwrite(file, data, offset)

    return pwrite


def counting(path: Path) -> Any:
    """Return a ``pwrite`` that stores the number of bytes written so far in a file."""
    total = 0

    def pwrite(file: int, data: Any, offset: int) -> int:
        nonlocal total
        total += memoryview(data).nbytes
        path.write_text(str(total))
        return plain_pwrite(file, data, offset)

    return pwrite


class FailingDisk:
    """Makes one operation on files below a directory fail, or all operations from this one on.

    Args:
        below: The directory.
        number: Number of the first operation that fails, counted from 0; if None, no operation fails.
        error: The ``errno`` of the failure.
        is_sticky: Whether all later operations that write fail too.

    Attributes:
        count: Number of operations so far.
    """

    def __init__(self, below: Path, number: int | None, error: int, *, is_sticky: bool) -> None:
        self._below, self._number, self._error, self._is_sticky = f"{below}{os.sep}", number, error, is_sticky
        self.count = 0

    def install(self) -> None:
        """Patch the file operations of `os`, `io` and `quark.base.files`."""
        for name in OPERATIONS:
            if hasattr(os, name):
                setattr(os, name, self._failing(getattr(os, name), name))
        files.pwrite = self._failing(files.pwrite, "pwrite")
        io.open = self._failing(io.open, "io.open")

    def _failing(self, plain: Any, name: str) -> Any:
        def operation(target: Any, *rest: Any, **named: Any) -> Any:
            writes = name not in ("open", "io.open") or _writes(name, rest, named)
            if writes and (isinstance(target, int) or str(os.fspath(target)).startswith(self._below)):
                self.count += 1
                late = self._number is not None and self.count - 1 > self._number
                if self.count - 1 == self._number or (late and self._is_sticky):
                    raise OSError(self._error, os.strerror(self._error), None if isinstance(target, int) else str(target))
            return plain(target, *rest, **named)

        return operation


def _writes(name: str, rest: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether a call of `os.open` or `io.open` opens a file for writing."""
    if name == "open":
        return bool((rest[0] if rest else named["flags"]) & (os.O_WRONLY | os.O_RDWR))
    return any(mark in str(rest[0] if rest else named.get("mode", "r")) for mark in "wax+")


def figures_of(report: CalibrationReport) -> dict[str, Any]:
    """Return the figures of a report without times."""
    values = report.to_dict()
    blocks = {name: {key: value for key, value in row.items() if key != "seconds"} for name, row in values["blocks"].items()}
    return {**values, "blocks": blocks, "seconds": None}


def work(job: dict[str, Any]) -> None:
    """Run one job.

    ``kill_after`` is the number of bytes after which the process is killed. If the process is not to be
    killed, ``count`` is a file for the number of bytes written. ``disk`` has the arguments of a `FailingDisk`,
    and ``operations`` is a file for the number of operations.
    """
    torch.set_num_threads(1)
    logging.getLogger("quark").setLevel(logging.ERROR)
    if job.get("kill_after") is not None:
        files.pwrite = killed_after(job["kill_after"])
    elif job.get("count"):
        files.pwrite = counting(Path(job["count"]))
    disk = FailingDisk(Path(job["out"]).parent, **job.get("disk") or {"number": None, "error": 0, "is_sticky": False})
    if job.get("disk") or job.get("operations"):
        disk.install()
    reports = []
    CalibrationReport.log = lambda report: reports.append(figures_of(report))  # type: ignore[method-assign]
    config = LLMTemplate.get("llama").get_config(**job["choices"])
    data = [torch.tensor(tokens) for tokens in job["data"]]
    options = ExportOptions(max_shard_bytes=job["max_shard_bytes"])
    quantize_checkpoint(job["source"], job["out"], config, data, options=options, resume=job["resume"])
    if job.get("operations"):
        Path(job["operations"]).write_text(str(disk.count))
    if reports:  # a run that has nothing to do makes no report
        Path(job["report"]).write_text(json.dumps(reports[0]))


def main() -> None:
    """Answer jobs until there are no more; if the command line has a job, run this job instead."""
    if len(sys.argv) > 1:
        work(json.loads(sys.argv[1]))
        return
    for line in sys.stdin:
        if not hasattr(os, "fork"):
            print(subprocess.run([sys.executable, __file__, line], check=False).returncode, flush=True)
            continue
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(json.loads(line))
                code = 0
            except QuarkError as error:
                Path(json.loads(line)["said"]).write_text(str(error))
                code = REFUSED
            except Exception:
                traceback.print_exc()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
