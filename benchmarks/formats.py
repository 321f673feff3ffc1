"""Speed of every number format on a 4096 × 4096 float32 tensor, beside a plain copy.

    python -m benchmarks.formats [--runs 9] [--threads 2] [--reference PYTHON]

The floor is ``x.clone()``: read the tensor once, write it once to fresh memory, as quantizing must. Each run times the floor and every
operation in turn; medians and their ratios are printed, with GB/s of float32 read and written. `fake-quantize` finds its scales from
the tensor.
``--reference`` is the interpreter of an environment with amd-quark 0.13, whose fake-quantize is timed in alternation (compilation off).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable

import torch
from torch import Tensor

from quark.numerics import TensorQuantizer, quantizer_for
from quark.plugins import documented_object

SIDE = 4096
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "int4 groups of 128": ("Int4PerGroupSpec", {"ch_axis": -1, "group_size": 128}),
    "uint4 groups of 128": ("Uint4PerGroupSpec", {"ch_axis": -1, "group_size": 128}),
    "int4 groups of 32": ("Int4PerGroupSpec", {"ch_axis": -1, "group_size": 32}),
    "int4 per channel": ("Int4PerChannelSpec", {"ch_axis": 0}),
    "int8 per tensor": ("Int8PerTensorSpec", {}),
    "fp8 e4m3 per tensor": ("FP8E4M3PerTensorSpec", {}),
    "fp8 e4m3 per channel": ("FP8E4M3PerChannelSpec", {"ch_axis": 0}),
    "mxfp4": ("OCP_MXFP4Spec", {"ch_axis": -1}),
    "mxfp6 e2m3": ("OCP_MXFP6E2M3Spec", {"ch_axis": -1}),
}
REFERENCE = """
import json, os, statistics, sys, time
os.environ["QUARK_DISABLE_COMPILE"] = "1"
import torch
from quark.torch.quantization.config import config as c
from quark.torch.quantization.tensor_quantize import FakeQuantizeBase
cases, side, threads = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
x = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
made = {}
for name, (cls, options) in cases.items():
    fq = FakeQuantizeBase.get_fake_quantize(getattr(c, cls)(is_dynamic=True, **options).to_quantization_spec())
    fq.enable_observer(); fq.enable_fake_quant()
    made[name] = fq
print("ready", flush=True)
for line in sys.stdin:
    name = line.strip()
    start = time.perf_counter()
    with torch.no_grad():
        x.clone() if name == "copy" else made[name](x)
    print(time.perf_counter() - start, flush=True)
"""


def operations(quantizer: TensorQuantizer, x: Tensor) -> dict[str, Callable[[], object]]:
    """The operations of one format, each on data prepared beforehand."""
    values, qparams = quantizer.round_to_nearest(x)
    codes = quantizer.quantize(values, qparams)
    packed = quantizer.pack(codes, qparams)
    return {
        "fake-quantize": lambda: quantizer.fake_quantize(x),
        "quantize": lambda: quantizer.quantize(values, qparams),
        "dequantize": lambda: quantizer.dequantize(codes, qparams),
        "pack": lambda: quantizer.pack(codes, qparams),
        "unpack": lambda: quantizer.unpack(packed, tuple(x.shape)),
    }


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Reference:
    """amd-quark in its own interpreter, one timing a line."""

    def __init__(self, python: str, threads: int) -> None:
        arguments = [python, "-c", REFERENCE, json.dumps(CASES), str(SIDE), str(threads)]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while self._line() != "ready":
            pass

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("benchmarks.formats: the reference's interpreter ended; has it amd-quark 0.13?")
        return line.strip()

    def seconds(self, name: str) -> float:
        """Time of its fake-quantize of that case, or of its copy."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._line())


def measure(args: argparse.Namespace, x: Tensor) -> None:
    quantizers = {
        name: quantizer_for(documented_object(cls)(is_dynamic=False, **options).to_quantization_spec(), activation=False)
        for name, (cls, options) in CASES.items()
    }
    actions = {(name, op): act for name, q in quantizers.items() for op, act in operations(q, x).items()}
    reference = Reference(args.reference, args.threads) if args.reference else None
    floor: list[float] = []
    warm: list[float] = []
    target = torch.empty_like(x)
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in actions}
    theirs: dict[str, list[float]] = {name: [] for name in ("copy", *CASES)}
    for run in range(args.runs + 1):
        floor += [seconds(x.clone)] if run else []
        warm += [seconds(lambda: target.copy_(x))] if run else []
        for key, action in actions.items():
            took = seconds(action)
            taken[key] += [took] if run else []
        for name in theirs if reference else ():
            took = reference.seconds(name) if reference else 0.0
            theirs[name] += [took] if run else []
    report(args, floor, taken, theirs if reference else {})
    print(f"A copy to memory that is there already takes {statistics.median(warm) / statistics.median(floor):.2f} of that floor.")


def report(args: argparse.Namespace, floor: list[float], taken: dict[tuple[str, str], list[float]], theirs: dict[str, list[float]]) -> None:
    copy, size = statistics.median(floor), 2 * SIDE * SIDE * 4 / 1e9
    print(f"torch {torch.__version__}, {args.threads} threads, {SIDE}×{SIDE} float32, medians of {args.runs}; copy {size / copy:.1f} GB/s")
    for (name, op), values in taken.items():
        time_ = statistics.median(values)
        beside = ""
        if op == "fake-quantize" and theirs:
            beside = f"   amd-quark {statistics.median(theirs[name]) / statistics.median(theirs['copy']):6.2f}× its copy"
        print(f"{name:22s} {op:14s} {size / time_:7.2f} GB/s {time_ / copy:6.2f}× a copy{beside}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reference", help="interpreter of an environment with amd-quark 0.13")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    with torch.no_grad():
        measure(args, torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)))


if __name__ == "__main__":
    main()
