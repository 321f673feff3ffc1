"""Run the benchmarks, check whether each figure meets its bar, and add the figures to a file of results.

    python -m benchmarks [--results docs/data/benchmarks.json] [--only startup,formats] [--model MODEL]
                         [--text TEXT_DIR] [--amd-quark PYTHON] [--llm-compressor PYTHON]

==========  =========  ===================================================================================
benchmark   needs      measures
==========  =========  ===================================================================================
startup                time to list every scheme, and to import ``quark.torch``
formats                time of each number format's operations; fake-quantize also in AMD Quark (--amd-quark)
kernels     a GPU      time of rounding, encoding and packing kernels ÷ a copy; time of the column loop
layers                 peak memory of quantization from disk to disk, for two numbers of layers
copy                   time of round-to-nearest from disk to disk ÷ loading and saving the same shards
evaluate               peak memory of comparing two checkpoints by block ÷ comparing them in memory
codes       --model    memory and time of models that run from codes ÷ those with weights in memory
rtn         --model    time of round-to-nearest from load to finished export ÷ a copy
calibrated  and --text time of GPTQ, AWQ and Qronos ÷ a forward pass; the same beside a busy process
cpu         and --text CPU seconds of algorithms in one thread ÷ a forward pass
cpu16       and --text the same as ``cpu``, for the model in bfloat16
ranks       and --text time of two processes of one core each ÷ one process
mixed       and --text KL divergence of mixed precision ÷ that of one scheme, and ÷ that of a heuristic
tuning      and --text accuracy of a tuned model, and its time
peers       and --text the same work in AMD Quark and llm-compressor, if you name their interpreters
==========  =========  ===================================================================================

The bar of a figure is the largest allowed value. ``evaluate`` and four more benchmarks run only if you name
them in ``--only``. ``tuned`` measures the accuracy of tuned models in MXFP4 and NVFP4. ``rotated`` measures
the accuracy of a rotated model in INT8. ``large`` quantizes an 8B model, and needs 21 GB of disk.
``codes-1b`` measures the memory of a Llama with 1.2 billion weights, which runs from codes. If a benchmark
fails, the program reports the failure and runs the others. The page *Benchmarks* of the documentation shows
the file of results.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.results import Measurement, add_run

INT4 = "gptq/int4_wo_64,awq/int4_wo_64,awq+gptq/int4_wo_64,qronos/int4_wo_64"
ONE_THREAD = f"{INT4},none/int8,rotation+smoothquant/int8,awq+gptq+tuning/int4_wo_64"
BFLOAT16 = f"none/int4_wo_64,{INT4},none/int8"
TUNED = "awq+gptq+tuning/mxfp4,awq+gptq+tuning/nvfp4"
ROTATED = ["--runs", "rotation+smoothquant+gptq/int8", "--options", '{"r2": true, "r4": true}']
MIXED = ["--sets", "fp8,mxfp6_e2m3,mxfp4_mxfp6_e2m3", "--bits", "5.125,6.25", "--uniform", "nvfp4,int4_wo_32,uint4_wo_32"]
Arguments = Callable[[argparse.Namespace], list[str] | None]
"""Returns a benchmark's arguments from the program's arguments; None if a required argument is missing."""


def _with_model(*more: str) -> Arguments:
    return lambda args: [args.model, *more] if args.model else None


def _with_text(*more: str) -> Arguments:
    return lambda args: [args.model, args.text, *more] if args.model and args.text else None


def _ranks(args: argparse.Namespace) -> list[str] | None:
    return [args.model, f"{args.text}/foldoc.txt", "--repeats", "1", "--calls", "8"] if args.model and args.text else None


def _peers(args: argparse.Namespace) -> list[str] | None:
    given = {"--amd-quark": args.amd_quark, "--llm-compressor": args.llm_compressor}
    flags = [text for flag, python in given.items() if python for text in (flag, python)]
    return [args.model, args.text, *flags] if args.model and args.text and flags else None


BENCHMARKS: dict[str, tuple[str, Arguments]] = {
    "startup": ("startup:main", lambda args: ["--runs", "5"]),
    "formats": ("formats:main", lambda args: ["--reference", args.amd_quark] if args.amd_quark else []),
    "kernels": ("kernels:main", lambda args: []),
    "layers": ("disk_to_disk:measurements", lambda args: ["layers", "--layers", "8"]),
    "copy": ("disk_to_disk:measurements", lambda args: ["copy", "--runs", "2"]),
    "evaluate": ("disk_to_disk:measurements", lambda args: ["evaluate"]),
    "codes": ("from_codes:main", _with_model()),
    "rtn": ("rtn:main", _with_model("--runs", "3")),
    "calibrated": ("calibrated:main", _with_text("--runs", INT4, "--busy", "1", "--no-quality")),
    "cpu": ("calibrated:main", _with_text("--runs", ONE_THREAD, "--one-thread", "--no-quality")),
    "cpu16": ("calibrated:main", _with_text("--runs", BFLOAT16, "--one-thread", "--no-quality", "--dtype", "bfloat16")),
    "ranks": ("shared_run:main", _ranks),
    "mixed": ("mixed_precision:main", _with_text(*MIXED)),
    "tuning": ("calibrated:main", _with_text("--runs", "awq+gptq+tuning/int4_wo_64")),
    "peers": ("peers:main", _peers),
    "tuned": ("calibrated:main", _with_text("--runs", TUNED)),
    "rotated": ("calibrated:main", _with_text(*ROTATED)),
    "large": ("disk_to_disk:measurements", lambda args: ["large"]),
    "codes-1b": ("from_codes:main", lambda args: []),
}
"""The function and the arguments of each benchmark."""
LONG = ("evaluate", "tuned", "rotated", "large", "codes-1b")
"""Benchmarks that run only if they are named."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="file to which the run is added")
    parser.add_argument("--only", default=",".join(name for name in BENCHMARKS if name not in LONG), help=f"any of {', '.join(BENCHMARKS)}")
    parser.add_argument("--model", help="directory of a float checkpoint; accuracy bars hold for SmolLM2-135M")
    parser.add_argument("--text", help="directory with foldoc.txt and devil.txt (Debian's dict-foldoc and dict-devil)")
    parser.add_argument("--amd-quark", metavar="PYTHON", help="interpreter of an environment with amd-quark")
    parser.add_argument("--llm-compressor", metavar="PYTHON", help="interpreter of an environment with llmcompressor")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    measured: list[Measurement] = []
    failed: list[str] = []
    threads = torch.get_num_threads()
    for name in args.only.split(","):
        place, of = BENCHMARKS[name]
        given = of(args)
        if given is None:
            print(f"== {name} does not run: an argument that it needs is missing. --help lists what each benchmark needs", flush=True)
            continue
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        module, _, function = place.partition(":")
        try:
            measured += getattr(importlib.import_module(f"benchmarks.{module}"), function)(given)
        except (Exception, SystemExit):
            traceback.print_exc()
            failed.append(name)
        torch.set_num_threads(threads)  # some benchmarks measure one thread
        print(f"== {name} took {time.perf_counter() - start:.0f} s", flush=True)
    if args.results:
        add_run(args.results, measured)
        print(f"Added {len(measured)} measurements to {args.results}.")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
