"""Measure memory and throughput of quantization from checkpoint to checkpoint, on Llamas with random weights.

The program writes the Llamas, and deletes them at the end.

    python -m benchmarks.disk_to_disk layers [--layers 15] [--samples 8] [--length 512]
    python -m benchmarks.disk_to_disk copy [--shape 1b] [--schemes fp8,int4_wo_128] [--runs 5]
    python -m benchmarks.disk_to_disk large [--shape 8b] [--scheme mxfp4_weight_only]
    python -m benchmarks.disk_to_disk evaluate [--shape 1b] [--scheme mxfp4_weight_only]

* ``layers`` measures the peak resident memory of GPTQ on models of SmolLM2's shape. With four times as many
  layers, the peak must be less than 10 % higher.
* ``copy`` measures the throughput of quantization, in alternation with loading and saving the same shards by
  safetensors. Quantization must reach at least half the throughput of this copy. Quantization waits until the
  disk has all bytes, and two more kinds of lines do so too: a copy, and, for each scheme, loading and saving
  the finished shards ("shards of …"). No program can be faster than these lines.
* ``large`` quantizes an 8B model of 16 GB with a peak under 4 GiB. For comparison, a copy through safetensors
  has a whole shard of 5 GB in memory.
* ``evaluate`` measures the peak memory of comparing a quantized checkpoint with its float checkpoint, once
  with both models in memory and once block by block. This figure has no bar.

A peak is the most resident memory of a fresh process (VmHWM, Linux), including pages of memory-mapped files.
The program writes checkpoints to ``--directory``; ``large`` needs 21 GB there. The exit status is 1 if a bar
is missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_checkpoints import SHAPES, write_random_checkpoint
from benchmarks.results import Measurement
from benchmarks.rtn import seconds, weights_only
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate

GROWTH = 1.10
SHARE_OF_COPY = 0.5
RESIDENT = 4 << 30


def status(field: str) -> int:
    """Return a field of ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def child(args: argparse.Namespace) -> None:
    """Quantize one checkpoint in this process, and print the cost as JSON."""
    import transformers.models.llama.modeling_llama  # noqa: F401 - counted with the imports, not with the run

    config, data = weights_only(args.scheme)("llama"), None
    if args.algorithm:
        config = LLMTemplate.get("llama").get_config(scheme=args.scheme, algorithm=[args.algorithm])
        draw = torch.Generator().manual_seed(0)
        data = [torch.randint(3, 40_000, (1, args.length), generator=draw) for _ in range(args.samples)]
    imported, start = status("VmRSS"), time.perf_counter()
    quantize_checkpoint(args.source, args.out, config, data)
    print(json.dumps({"imported": imported, "peak": status("VmHWM"), "seconds": time.perf_counter() - start}))


def comparing(args: argparse.Namespace) -> None:
    """Compare a quantized checkpoint with its float checkpoint in this process; print the cost as JSON."""
    import transformers.models.llama.modeling_llama  # noqa: F401 - counted with the imports

    from quark.checkpoint.transformers_loading import register_layouts
    from quark.models.hf.loading import load_model
    from quark_workbench.evaluate import Windows, compare
    from quark_workbench.evaluate.by_block import compare_by_block

    register_layouts()
    tokens = torch.randint(3, 40_000, (4, 65), generator=torch.Generator().manual_seed(0))
    windows = list(Windows(tokens, torch.ones(len(tokens), dtype=torch.int64)).split(4))
    imported, start = status("VmRSS"), time.perf_counter()
    if args.by_block:
        found = compare_by_block(args.out, args.source, windows)
    else:
        found = compare(load_model(args.out), load_model(args.source), windows)
    took = {"imported": imported, "peak": status("VmHWM"), "seconds": time.perf_counter() - start}
    print(json.dumps(took | {"kl": found.mean_kl}))


def evaluate(args: argparse.Namespace, directory: Path) -> list[Measurement]:
    """Measure the peak memory of a comparison, block by block and with both models in memory."""
    source = write_random_checkpoint(directory / "source", args.shape, args.layers)
    measured(source, directory / "out", args.scheme)
    runs = {}
    for name, more in {"in memory": [], "by block": ["--by-block"]}.items():
        runs[name] = run = in_fresh_process("comparing", str(source), str(directory / "out"), args.scheme, *more)
        print(f"{name}: peak {run['peak'] / 2**20:.0f} MiB, of which imports are {run['imported'] / 2**20:.0f}; KL {run['kl']:.9g}")
    case, floor = f"{args.shape} and {args.scheme}, by block", "both models in memory"
    return [Measurement("evaluation: peak memory", case, runs["by block"]["peak"] / runs["in memory"]["peak"], "×", floor)]


def measured(source: Path, out: Path, scheme: str, *more: str) -> dict[str, Any]:
    """Run `child` in a fresh process, and return its output."""
    return in_fresh_process("child", str(source), str(out), scheme, *more)


def in_fresh_process(kind: str, *arguments: str) -> dict[str, Any]:
    """Run this program in a fresh process, and return its output."""
    command = [sys.executable, "-m", "benchmarks.disk_to_disk", kind, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def layers(args: argparse.Namespace, directory: Path) -> list[Measurement]:
    """Measure the peak memory with ``args.layers`` decoder layers, and with four times as many."""
    peaks = []
    for count in (args.layers, 4 * args.layers):
        source = write_random_checkpoint(directory / f"layers-{count}", "smollm2", count)
        more = ("--algorithm", "gptq", "--samples", str(args.samples), "--length", str(args.length))
        run = measured(source, directory / f"out-{count}", args.scheme, *more)
        peaks.append(run["peak"])
        print(
            f"{count:4d} layers, {_size(source) / 1e6:6.0f} MB: peak {run['peak'] / 2**20:5.0f} MiB, of which imports are "
            f"{run['imported'] / 2**20:.0f}; {run['seconds']:.0f} s"
        )
    print(f"growth {peaks[1] / peaks[0] - 1:.1%}, bar below {GROWTH - 1:.0%}")
    case = f"GPTQ of {4 * args.layers} layers"
    return [Measurement("disk to disk: peak memory", case, peaks[1] / peaks[0], "×", f"GPTQ of {args.layers} layers", GROWTH)]


def copying(source: Path, *, to_the_disk: bool = False) -> Callable[[Path], None]:
    """Return a function that loads and saves every shard of a checkpoint.

    With ``to_the_disk``, the function also waits until the disk has all bytes.
    """

    def copied(out: Path) -> None:
        out.mkdir()
        for shard in sorted(source.glob("*.safetensors")):
            save_file(load_file(shard), out / shard.name, metadata={"format": "pt"})
            if to_the_disk:
                with (out / shard.name).open("rb") as file:
                    os.fsync(file)

    return copied


def quantizing(source: Path, scheme: str) -> Callable[[Path], None]:
    """Return a function that quantizes the checkpoint by rounding to nearest."""

    def quantized(out: Path) -> None:
        quantize_checkpoint(source, out, weights_only(scheme)("llama"))

    return quantized


def saving(source: Path, scheme: str, directory: Path) -> Callable[[Path], None]:
    """Return a function that loads and saves the shards of a checkpoint quantized in ``scheme``.

    The function also waits until the disk has all bytes.
    """
    quantizing(source, scheme)(directory)
    return copying(directory, to_the_disk=True)


def copy(args: argparse.Namespace, directory: Path) -> list[Measurement]:
    """Measure the time of quantization ÷ the time of loading and saving the same shards."""
    source = write_random_checkpoint(directory / "source", args.shape, args.layers)

    actions = {"copy": copying(source), "copy to the disk": copying(source, to_the_disk=True)}
    schemes = args.schemes.split(",")
    for scheme in schemes:
        actions |= {scheme: quantizing(source, scheme), f"shards of {scheme}": saving(source, scheme, directory / scheme)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for run in range(args.runs + 1):
        for name, action in actions.items():
            before = time.process_time()
            wall = seconds(action)
            if run:  # the first round warms caches
                taken[name].append((wall, time.process_time() - before))
    print(f"{args.shape}, {_size(source) / 1e9:.1f} GB, medians of {args.runs}; throughput in units of the copy's in the same round")
    found = []
    for name, times in taken.items():
        share = statistics.median(floor / wall for (floor, _), (wall, _) in zip(taken["copy"], times, strict=True))
        wall, processor = (statistics.median(t[i] for t in times) for i in (0, 1))
        print(f"{name:26s} {wall:7.2f} s, {processor:7.2f} s of processors, {_size(source) / wall / 1e9:5.2f} GB/s {share:5.2f}× a copy")
        bar = 1 / SHARE_OF_COPY if name in schemes else None
        floor = "loading and saving the same shards"
        found += [Measurement("disk to disk: time", f"{name} ({args.shape})", 1 / share, "×", floor, bar)] if name != "copy" else []
    print(f"bar {SHARE_OF_COPY}×")
    return found


def large(args: argparse.Namespace, directory: Path) -> list[Measurement]:
    """Measure peak memory and throughput on a model that is larger than the memory limit."""
    source = write_random_checkpoint(directory / "source", args.shape, args.layers)
    run = measured(source, directory / "out", args.scheme)
    sizes = f"{_size(source) / 1e9:.1f} GB → {_size(directory / 'out') / 1e9:.1f} GB"
    print(
        f"{args.shape}, {sizes} as {args.scheme}: peak {run['peak'] / 2**30:.2f} GiB, "
        f"bar {RESIDENT / 2**30:.0f}; {run['seconds']:.0f} s, {_size(source) / run['seconds'] / 1e9:.2f} GB/s"
    )
    bar = RESIDENT / 2**30
    case = f"{args.shape} as {args.scheme}"
    return [
        Measurement("disk to disk: a large model", case, run["peak"] / 2**30, "GiB", f"a checkpoint of {_size(source) / 1e9:.0f} GB", bar)
    ]


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="directory for checkpoints; default: the system's temporary directory")
    kinds = parser.add_subparsers(required=True)
    calibrated = argparse.ArgumentParser(add_help=False)
    calibrated.add_argument("--samples", type=int, default=8)
    calibrated.add_argument("--length", type=int, default=512)
    kind = kinds.add_parser("layers", parents=[calibrated])
    kind.set_defaults(bar=layers)
    kind.add_argument("--layers", type=int, default=15)
    kind.add_argument("--scheme", default="int4_wo_64")
    kind = kinds.add_parser("copy")
    kind.set_defaults(bar=copy)
    kind.add_argument("--shape", choices=SHAPES, default="1b")
    kind.add_argument("--layers", type=int)
    kind.add_argument("--schemes", default="fp8,int4_wo_128,mxfp4_weight_only")
    kind.add_argument("--runs", type=int, default=5)
    kind = kinds.add_parser("large")
    kind.set_defaults(bar=large)
    kind.add_argument("--shape", choices=SHAPES, default="8b")
    kind.add_argument("--layers", type=int)
    kind.add_argument("--scheme", default="mxfp4_weight_only")
    kind = kinds.add_parser("evaluate")
    kind.set_defaults(bar=evaluate)
    kind.add_argument("--shape", choices=SHAPES, default="1b")
    kind.add_argument("--layers", type=int)
    kind.add_argument("--scheme", default="mxfp4_weight_only")
    # The program starts these two in fresh processes.
    for name, work in (("child", child), ("comparing", comparing)):
        kind = kinds.add_parser(name, parents=[calibrated])
        kind.set_defaults(bar=None, work=work)
        for argument, of in (("source", Path), ("out", Path), ("scheme", str)):
            kind.add_argument(argument, type=of)
        kind.add_argument("--algorithm")
        kind.add_argument("--by-block", action="store_true")
    return parser


def measurements(arguments: list[str]) -> list[Measurement]:
    """Run the measurements that the arguments name, print them and return them."""
    args = _parser().parse_args(arguments)
    logging.getLogger("quark").setLevel(logging.ERROR)
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors" if hasattr(os, "getloadavg") else ""
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads, {load}")
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        found: list[Measurement] = args.bar(args, Path(directory))
    return found


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    if args.bar is None:
        logging.getLogger("quark").setLevel(logging.ERROR)
        args.work(args)
        return
    found = measurements(sys.argv[1:] if arguments is None else arguments)
    sys.exit(0 if all(one.is_met for one in found) else 1)


if __name__ == "__main__":
    main()
