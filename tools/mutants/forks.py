"""Fork one process that has imported torch, transformers and pytest; each fork has its own working tree."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

MEMORY = 8 << 30  # most bytes of data of a fork: a change that fills memory must not stop the machine
WAITING = 3  # wall time limit ÷ CPU time limit: the machine does other work too
TIMEOUT = 124  # status of a fork that was killed
PRELOADED = ("numpy", "hypothesis", "pytest", "torch", "transformers.models.llama.modeling_llama", "safetensors.torch", "greenlet")


@attrs.frozen
class Job:
    """The work of one fork.

    The parent process calls `prepare` with the fork's tree before the fork starts, and `restore` after the
    fork has ended. `run` returns the exit status.
    """

    what: Any
    run: Callable[[Path], int]
    seconds: float
    prepare: Callable[[Path], None] = lambda tree: None
    restore: Callable[[Path], None] = lambda tree: None


def preload() -> None:
    """Import modules that nearly every test needs and that no change touches."""
    for name in PRELOADED:
        __import__(name)


def source_folders(tree: Path) -> list[str]:
    """Return the import path of `tree`: the tree, and the sources of each distribution."""
    found = [path for pattern in ("core/src", "*/src", "*/*/src", "src") for path in sorted(tree.glob(pattern)) if path.is_dir()]
    return [str(tree), *dict.fromkeys(str(path) for path in found)]


def run_all(jobs: Iterable[Job], trees: Sequence[Path]) -> Iterator[tuple[Job, int, float]]:
    """Run each job in a fork. At most one fork at a time uses a tree. Yield each job with its exit status and
    its time in seconds."""
    waiting, free, running = iter(jobs), list(trees), {}
    while True:
        while free and (job := next(waiting, None)) is not None:
            tree = free.pop()
            job.prepare(tree)
            running[_fork(job, tree)] = (job, tree, time.monotonic())
        if not running:
            return
        time.sleep(0.02)
        for pid, (job, tree, begun) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            taken = time.monotonic() - begun
            if not ended and taken < WAITING * job.seconds:
                continue
            _kill_group(pid)
            if not ended:
                os.waitpid(pid, 0)
            del running[pid]
            job.restore(tree)
            free.append(tree)
            yield job, os.waitstatus_to_exitcode(status) if ended and not os.WIFSIGNALED(status) else TIMEOUT, taken


def _fork(job: Job, tree: Path) -> int:
    """Start the fork of a job, and return the process id, which is also the id of the process group."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) != 0:
        return pid
    try:
        import resource  # Windows has neither this function nor forks

        os.setsid()
        limit = int(job.seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(tree)
        sys.path[:0] = sources = source_folders(tree)
        os.environ["PYTHONPATH"] = os.pathsep.join(sources)
        os._exit(job.run(tree))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _kill_group(pid: int) -> None:
    """End the processes that a fork left running."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def quiet(output: Path) -> None:
    """Redirect the output of this process to a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for stream in (1, 2):
        os.dup2(file, stream)
