"""A program that runs `quantize_checkpoint` in processes that are killed.

`test_killed_runs` starts it and sends it jobs.

It reads one job a line from its standard input, as JSON, runs it in a fork of itself, and answers with what
became of that process: its exit code, which is not 0 or 1 where it was killed. A fork begins with everything
imported, and with no thread but its own; where there are none, a process of its own runs the job.
"""

from __future__ import annotations

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
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate

plain_pwrite = files.pwrite
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # the second ends a process of Windows at once


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
    """A ``pwrite`` that keeps the number of bytes so far in a file."""
    total = 0

    def pwrite(file: int, data: Any, offset: int) -> int:
        nonlocal total
        total += memoryview(data).nbytes
        path.write_text(str(total))
        return plain_pwrite(file, data, offset)

    return pwrite


def figures_of(report: CalibrationReport) -> dict[str, Any]:
    """The figures of a report, without times."""
    values = report.to_dict()
    blocks = {name: {key: value for key, value in row.items() if key != "seconds"} for name, row in values["blocks"].items()}
    return {**values, "blocks": blocks, "seconds": None}


def work(job: dict[str, Any]) -> None:
    """Run one job.

    ``kill_after`` is a number of bytes, ``count`` a file for their number in a run that is not killed.
    """
    torch.set_num_threads(1)
    logging.getLogger("quark").setLevel(logging.ERROR)
    if job.get("kill_after") is not None:
        files.pwrite = killed_after(job["kill_after"])
    elif job.get("count"):
        files.pwrite = counting(Path(job["count"]))
    reports = []
    CalibrationReport.log = lambda report: reports.append(figures_of(report))  # type: ignore[method-assign]
    config = LLMTemplate.get("llama").get_config(**job["choices"])
    data = [torch.tensor(tokens) for tokens in job["data"]]
    options = ExportOptions(max_shard_bytes=job["max_shard_bytes"])
    quantize_checkpoint(job["source"], job["out"], config, data, options=options, resume=job["resume"])
    Path(job["report"]).write_text(json.dumps(reports[0]))


def main() -> None:
    """Answer jobs until there are no more; or run the one that is the argument."""
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
            except Exception:
                traceback.print_exc()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
