"""A program that runs scripts as ``python`` or ``torchrun`` would, in forks of itself.

`test_process_group` starts it and sends it jobs.

It reads one job a line from its standard input, as JSON, runs it in a fork, and answers with the exit code. A
fork begins with torch and transformers imported, which otherwise takes most of the time of a run.
``torchrun`` is torch's own; it forks the processes that it starts.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from typing import Any

import torch
import torch.distributed.run
import transformers.models.llama.modeling_llama  # noqa: F401 - imported once, and not in every fork

import quark.runs  # noqa: F401


def work(ranks: int, restarts: int, script: str, arguments: list[str]) -> None:
    """Run a script in ``ranks`` processes of one thread each."""
    torch.set_num_threads(1)
    if ranks == 1:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
    else:
        many = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts), "--start-method", "fork"]
        torch.distributed.run.main([*many, "--run-path", script, *arguments])


def exit_code(job: dict[str, Any]) -> int:
    """Run a job whose output goes to a file, and return the exit code of its process."""
    file = os.open(job.pop("output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        work(**job)
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Answer jobs until there are no more."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = exit_code(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
