"""Measure speed and peak memory of every number format on a 4096 × 4096 float32 tensor, relative to a copy.

    python -m benchmarks.formats [--runs 9] [--threads 2] [--only mxfp4,mx6] [--reference PYTHON]

The floor is the time of ``x.clone()``, which reads the tensor once and writes it once to new memory.
Quantization must do both too. Each run times the floor and every operation in turn. The program prints
medians, their ratios to the floor, and how many GB/s of float32 an operation reads and writes.
`fake-quantize` also computes scales from the tensor. The peak memory of `fake-quantize` includes the tensor
and the result, and is a multiple of the tensor's size (Linux only). ``--reference`` names the interpreter of
an environment with amd-quark 0.13. The fake-quantize of amd-quark is timed without compilation, in
alternation with the other operations.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import quark
from benchmarks.results import Measurement
from quark.numbers import TensorQuantizer, quantizer_for
from quark.plugins import documented_object

SIDE = 4096
LAST = {"ch_axis": -1}
WARM_BARS = {"int8 per tensor": 1.6, "int4 groups of 128": 2.2, "fp8 per tensor": 2.45}
"""Bar of fake-quantize in multiples of a copy to allocated memory; half of its time when the bars were set.
"""
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "int2 groups of 32": ("Int2PerGroupSpec", {**LAST, "group_size": 32}),
    "int3 groups of 128": ("Int3PerGroupSpec", {**LAST, "group_size": 128}),
    "int4 groups of 128": ("Int4PerGroupSpec", {**LAST, "group_size": 128}),
    "uint4 groups of 128": ("Uint4PerGroupSpec", {**LAST, "group_size": 128}),
    "int4 groups of 32": ("Int4PerGroupSpec", {**LAST, "group_size": 32}),
    "int4 per channel": ("Int4PerChannelSpec", {"ch_axis": 0}),
    "int8 per tensor": ("Int8PerTensorSpec", {}),
    "uint8 per tensor": ("Uint8PerTensorSpec", {}),
    "fp8 e4m3 per tensor": ("FP8E4M3PerTensorSpec", {}),
    "fp8 e4m3 per channel": ("FP8E4M3PerChannelSpec", {"ch_axis": 0}),
    "fp8 e5m2 per tensor": ("FP8E5M2PerTensorSpec", {}),
    "fp4 groups of 32": ("FP4PerGroupSpec", {**LAST, "group_size": 32}),
    "mxfp4": ("OCP_MXFP4Spec", LAST),
    "mxfp6 e2m3": ("OCP_MXFP6E2M3Spec", LAST),
    "mxfp6 e3m2": ("OCP_MXFP6E3M2Spec", LAST),
    "mxfp8 e4m3": ("OCP_MXFP8E4M3Spec", LAST),
    "mxint8": ("OCP_MXINT8Spec", LAST),
    "amdfp4": ("AmdFP4Spec", {**LAST, "group_size": 16}),
    "mx6": ("MX6Spec", {**LAST, "block_size": 16}),
    "mx9": ("MX9Spec", {**LAST, "block_size": 16}),
    "bfp16": ("BFP16Spec", LAST),
}
TWO_STAGES = ("nvfp4", "int4_fp8")
"""Schemes whose weights are also measured, but not with AMD Quark."""
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
    helper = getattr(c, cls)
    dynamic = {"is_dynamic": True} if "is_dynamic" in helper.__dataclass_fields__ else {}
    fq = FakeQuantizeBase.get_fake_quantize(helper(**dynamic, **options).to_quantization_spec())
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
    """Return a dictionary from name to operation of one format.

    The inputs of each operation are prepared, so their computation is not timed.
    """
    values, qparams = quantizer.round_to_nearest(x)
    codes = quantizer.codes_of(values, qparams)
    packed = quantizer.pack(codes, qparams)
    return {
        "fake-quantize": lambda: quantizer.fake_quantize(x),
        "quantize": lambda: quantizer.quantize(values, qparams),
        "dequantize": lambda: quantizer.dequantize(codes, qparams),
        "pack": lambda: quantizer.pack(codes, qparams),
        "unpack": lambda: quantizer.unpack(packed, tuple(x.shape)),
    }


def seconds(action: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Reference:
    """Measures amd-quark in an interpreter of its own, which prints one time per line."""

    def __init__(self, python: str, threads: int, cases: dict[str, tuple[str, dict[str, object]]]) -> None:
        arguments = [python, "-c", REFERENCE, json.dumps(cases), str(SIDE), str(threads)]
        others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it leads to another quark
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=others
        )
        while self._line() != "ready":
            pass

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("benchmarks.formats: the interpreter of --reference ended: install amd-quark 0.13 in its environment")
        return line.strip()

    def seconds(self, name: str) -> float:
        """Return the time of amd-quark's fake-quantize in the case ``name``.

        For the name ``copy``, return the time of a copy.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._line())


def quantizers(only: str) -> dict[str, TensorQuantizer]:
    """Return a dictionary from case to quantizer."""
    wanted = only.split(",") if only else [*CASES, *TWO_STAGES]
    specs = {name: quark.schemes().load_config(name)().weight for name in TWO_STAGES if name in wanted}
    for name in (n for n in CASES if n in wanted):
        helper, options = documented_object(CASES[name][0]), CASES[name][1]
        static = {"is_dynamic": False} if any(a.name == "is_dynamic" for a in helper.__attrs_attrs__) else {}
        specs[name] = helper(**static, **options).to_quantization_spec()
    return {name: quantizer_for(spec, activation=False) for name, spec in specs.items()}


def peak(action: Callable[[], object], x: Tensor) -> float | None:
    """Return the peak memory of a call ÷ the size of ``x``, or None if the system does not report it.

    The peak memory includes ``x``.
    """
    try:
        # This returns freed memory to the system. Else the peak would miss memory that the call reuses.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except (OSError, AttributeError):
        return None
    before = _status("VmRSS")
    kept = action()
    found = (_status("VmHWM") - before) * 1024 / x.nbytes + 1
    del kept
    return found


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(args: argparse.Namespace, x: Tensor) -> list[Measurement]:
    made = quantizers(args.only)
    actions = {(name, op): act for name, q in made.items() for op, act in operations(q, x).items()}
    cases = {name: CASES[name] for name in made if name in CASES}
    reference = Reference(args.reference, args.threads, cases) if args.reference else None
    floor: list[float] = []
    warm: list[float] = []
    target = torch.empty_like(x)
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in actions}
    theirs: dict[str, list[float]] = {name: [] for name in ("copy", *cases)}
    for run in range(args.runs + 1):
        floor += [seconds(x.clone)] if run else []
        warm += [seconds(lambda: target.copy_(x))] if run else []
        for key, action in actions.items():
            took = seconds(action)
            taken[key] += [took] if run else []
        for name in theirs if reference else ():
            took = reference.seconds(name) if reference else 0.0
            theirs[name] += [took] if run else []
    peaks = {name: peak(actions[name, "fake-quantize"], x) for name in made}
    report(args, floor, taken, theirs if reference else {}, peaks)
    print(f"A copy to allocated memory takes {statistics.median(warm) / statistics.median(floor):.2f} of that floor.")
    copy, what = statistics.median(floor), f"a copy of {SIDE}×{SIDE} float32 to fresh memory, {args.threads} threads"
    found = [Measurement(f"formats: {op}", name, statistics.median(values) / copy, "×", what) for (name, op), values in taken.items()]
    for name, bar in WARM_BARS.items():
        if (name, "fake-quantize") in taken:
            ratio = statistics.median(taken[name, "fake-quantize"]) / statistics.median(warm)
            found.append(Measurement("formats: fake-quantize, warm", name, ratio, "×", "a copy to memory that is there already", bar))
    for name in cases if reference else ():
        ratio = statistics.median(theirs[name]) / statistics.median(theirs["copy"])
        found.append(Measurement("formats: fake-quantize of AMD Quark", name, ratio, "×", "a copy in its own process"))
    return found


def report(
    args: argparse.Namespace,
    floor: list[float],
    taken: dict[tuple[str, str], list[float]],
    theirs: dict[str, list[float]],
    peaks: dict[str, float | None],
) -> None:
    copy, size = statistics.median(floor), 2 * SIDE * SIDE * 4 / 1e9
    print(f"torch {torch.__version__}, {args.threads} threads, {SIDE}×{SIDE} float32, medians of {args.runs}; copy {size / copy:.1f} GB/s")
    for (name, op), values in taken.items():
        time_ = statistics.median(values)
        beside = ""
        if op == "fake-quantize":
            beside = "" if peaks[name] is None else f"   peak {peaks[name]:.2f}× the tensor"
        if op == "fake-quantize" and name in theirs:
            beside += f"   amd-quark {statistics.median(theirs[name]) / statistics.median(theirs['copy']):6.2f}× its copy"
        print(f"{name:22s} {op:14s} {size / time_:7.2f} GB/s {time_ / copy:6.2f}× a copy{beside}")


def main(arguments: list[str] | None = None) -> list[Measurement]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reference", help="interpreter of an environment with amd-quark 0.13")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    with torch.no_grad():
        return measure(args, torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)))


if __name__ == "__main__":
    main()
