"""Measure kernels on a GPU: the bandwidth of rounding, encoding and packing, and the time of the column loop.

    python -m benchmarks.kernels [--runs 50] [--side 8192]

The floor of an elementwise kernel is ``out.copy_(x)``, which reads and writes as many bytes in total as the
kernel. The bar is 70 % of the copy's bandwidth. Times are medians, measured with CUDA events. Before each
call, the GPU waits until the host has launched the kernel, so a time does not include the launch. Tensors are
larger than the GPU's caches. Without a GPU, the program measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

import quark
from benchmarks.results import Measurement
from quark.numbers import WeightGrid, quantizer_for
from quark.numbers.kernels import uses_kernels
from quark_algos.gptq.damping import factor
from quark_algos.gptq.gptq import ldlq
from quark_schemes.arithmetic.packing import pack_nibbles, pack_nibbles_across, unpack_nibbles, unpack_nibbles_across

SCHEMES = ("int4_wo_32", "int4_wo_128", "uint4_wo_128", "mxfp4", "mxfp6_e3m2", "nvfp4", "fp8", "ptpc_fp8", "int8")
BAR = 1 / 0.70
COLUMNS, ROWS = 4096, 4096
LAUNCHING = 2_000_000
"""Cycles that the GPU waits before each call: about a millisecond, enough for the host to launch the call."""


def seconds(action: Callable[[], object], runs: int) -> float:
    """Return the median time of a call on the GPU.

    Three unmeasured calls come first, which compile and warm up.
    """
    for _ in range(3):
        action()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(LAUNCHING)  # type: ignore[attr-defined]
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def elementwise(side: int, runs: int, device: torch.device) -> list[Measurement]:
    x = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    found = []
    for scheme in SCHEMES:
        quantizer = quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False)
        values, scales = quantizer.round_to_nearest(x)
        codes = quantizer.quantize(x, scales)
        cases: dict[str, tuple[Callable[[], object], int]] = {
            "with given scales": (lambda q=quantizer, s=scales: q.fake_quantize(x, s, out=out), 2 * x.nbytes),  # type: ignore[misc]
            "values of codes": (lambda q=quantizer, s=scales, c=codes: q.dequantize_to(c, s, out), x.nbytes + codes.nbytes),  # type: ignore[misc]
            "codes": (lambda q=quantizer, s=scales: q.quantize(x, s), x.nbytes + codes.nbytes),  # type: ignore[misc]
        }
        if not quantizer.has_tensor_scale:  # such scales need a separate pass
            cases["finding scales"] = (lambda q=quantizer: q.round_to_nearest(x, out=out), 2 * x.nbytes)  # type: ignore[misc]
        for what, (action, size) in cases.items():
            source, target = (torch.empty(size // 2, dtype=torch.uint8, device=device) for _ in range(2))
            floor = seconds(lambda s=source, t=target: t.copy_(s), runs)  # type: ignore[misc]
            taken = seconds(action, runs)
            print(f"{scheme:14} {what:18} {size / taken / 1e9:7.0f} GB/s, {floor / taken:5.2f} of a copy", flush=True)
            found.append(Measurement(f"kernels: {what}", scheme, taken / floor, "×", "a copy of as many bytes on the GPU", BAR))
        del values, codes
    return found


def packing(side: int, runs: int, device: torch.device) -> list[Measurement]:
    codes = torch.randint(0, 16, (side, 2 * side), device=device, dtype=torch.uint8)
    source, target = (torch.empty(codes.nbytes * 3 // 4, dtype=torch.uint8, device=device) for _ in range(2))
    floor = seconds(lambda: target.copy_(source), runs)
    found = []
    across, along = pack_nibbles_across(codes, "reorder"), pack_nibbles(codes, "reorder")
    cases: dict[str, Callable[[], object]] = {
        "nibbles across rows": lambda: pack_nibbles_across(codes, "reorder"),
        "nibbles along rows": lambda: pack_nibbles(codes, "reorder"),
        "nibbles across rows, unpacked": lambda: unpack_nibbles_across(across, "reorder", side, signed=True),
        "nibbles along rows, unpacked": lambda: unpack_nibbles(along, "reorder", 2 * side, signed=True),
    }
    for name, action in cases.items():
        taken = seconds(action, runs)
        print(f"{name:33} {codes.nbytes * 1.5 / taken / 1e9:7.0f} GB/s, {floor / taken:5.2f} of a copy", flush=True)
        found.append(Measurement("kernels: packing", name, taken / floor, "×", "a copy of as many bytes on the GPU", BAR))
    return found


def columns(runs: int, device: torch.device) -> list[Measurement]:
    wt = torch.randn(COLUMNS, ROWS, device=device)
    inputs = torch.randn(2 * COLUMNS, COLUMNS, device=device)
    found = factor(inputs.t() @ inputs, 0.01)
    spec = quark.schemes().load_config("int4_wo_128")().weight
    grid = WeightGrid([quantizer_for(spec, activation=False)], [ROWS], wt)
    rounder = grid.rounder(grid.scales(wt))
    floor = seconds(lambda: torch.mm(found.a, wt), runs)
    taken = seconds(lambda: ldlq(wt, found, rounder), runs)
    print(f"column loop of {ROWS} × {COLUMNS}: {taken * 1e3:.2f} ms, {taken / floor:.1f} products of its matrices", flush=True)
    return [Measurement("kernels: column loop", "int4_wo_128", taken / floor, "×", "a product of the factor and the weight, float32")]


def main(arguments: list[str] | None = None) -> list[Measurement]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--side", type=int, default=8192)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available() or not uses_kernels(torch.device("cuda")):
        print("Nothing is measured: run this on a machine with a GPU and Triton.")
        return []
    device = torch.device("cuda")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {args.side} × {args.side} bfloat16, medians of {args.runs}")
    return [*elementwise(args.side, args.runs, device), *packing(args.side, args.runs, device), *columns(args.runs, device)]


if __name__ == "__main__":
    main()
