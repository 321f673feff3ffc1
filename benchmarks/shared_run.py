"""Time a run by one process, and the same run shared by several processes. Each process has one core.

    python -m benchmarks.shared_run MODEL TEXT [--ranks 2] [--scheme int4_wo_64] [--algorithm gptq] [--calls
    16] [--repeats 3]

Runs by one process and runs by several processes alternate. ``wall`` is the time of `quantize_checkpoint` on
the slowest rank, without imports, in seconds. ``cpu`` is the CPU seconds of the slowest rank. It excludes
waiting for other ranks, and other programs hardly change it. ``ratio`` is the median of several processes ÷
the median of one. The project's bar is a ``wall`` ratio of 0.6 for two processes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results import Measurement

__all__ = ["main"]

BAR = 0.6
"""Largest ratio of two processes' wall time to one process's, on two idle cores."""


def work(args: argparse.Namespace) -> None:
    """Quantize as one of the ranks; the first rank prints the seconds of the slowest rank."""
    from quark.models.hf.tokenizer import load_tokenizer
    from quark.runs import quantize_checkpoint
    from quark.torch import LLMTemplate
    from quark_workbench.data import read_samples, token_sequences
    from quark_workbench.process_group import ranks_of_environment

    torch.set_num_threads(1)
    data = token_sequences(load_tokenizer(args.model), read_samples(args.text), args.calls, args.length)
    config = LLMTemplate.get(json.loads((args.model / "config.json").read_text())["model_type"]).get_config(
        scheme=args.scheme, algorithm=[args.algorithm]
    )
    with ranks_of_environment(torch.device("cpu"), is_deterministic=args.deterministic) as (ranks, _):
        ranks.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        quantize_checkpoint(args.model, args.out, config, data, ranks=ranks)
        seconds = ranks.gather((time.perf_counter() - wall, time.process_time() - cpu))
    if ranks.is_first:
        print(json.dumps({"wall": max(s[0] for s in seconds), "cpu": max(s[1] for s in seconds)}))


def measured(ranks: int, arguments: list[str]) -> dict[str, float]:
    """Return the wall and CPU seconds of a run by ``ranks`` processes."""
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, *many, "-m", "benchmarks.shared_run", *arguments, "--out", f"{directory}/out"]
        output = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout
    seconds: dict[str, float] = json.loads(output.splitlines()[-1])
    return seconds


def main(arguments: list[str] | None = None) -> list[Measurement]:
    """Measure the runs; print a line of JSON for each run, and one for the ratios."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scheme", default="int4_wo_64")
    parser.add_argument("--algorithm", default="gptq")
    parser.add_argument("--calls", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.out is not None:
        work(args)
        return []
    runs: dict[int, list[dict[str, float]]] = {1: [], args.ranks: []}
    for _ in range(args.repeats):
        for ranks, each in runs.items():
            each.append(measured(ranks, given))
            print(
                json.dumps({"ranks": ranks, "load": round(os.getloadavg()[0], 1), **{k: round(s, 1) for k, s in each[-1].items()}}),
                flush=True,
            )
    one, several = (
        {kind: statistics.median(run[kind] for run in each) for kind in ("wall", "cpu")} for each in (runs[1], runs[args.ranks])
    )
    print(json.dumps({"ratio": {kind: round(several[kind] / one[kind], 3) for kind in one}}))
    case, floor = f"{args.algorithm}, {args.ranks} processes of one core", "one process of one core"
    return [Measurement("several processes", case, several["wall"] / one["wall"], "×", floor, BAR)]


if __name__ == "__main__":
    main()
