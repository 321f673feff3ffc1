"""Compile the kernels for a GPU that this machine lacks, as a launch would, and print a line of JSON for each.

    python -m tests.kit.compile_kernels [cuda:90] [kinds|specs]

``kinds``, the default, compiles every kernel for some schemes. ``specs`` compiles the rounding kernels of
every spec of `tests.kit.kernel_specs`, for each floating-point dtype. Triton has its own compiler and
assembler, so only running the result needs a GPU.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ["QUARK_KERNELS"] = "cpu"

import attrs
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import quark
from quark.numbers import QParams, WeightGrid, quantizer_for
from quark_algos.gptq.damping import factor
from quark_algos.gptq.gptq import ldlq
from quark_schemes.arithmetic.packing import pack_nibbles, pack_nibbles_across, pack_two, unpack_bits, unpack_nibbles, unpack_nibbles_across
from tests.kit.kernel_specs import CASES


class AbsentDriver:
    """A driver that only tells Triton which GPU to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@attrs.frozen
class Compiled:
    """The result of compiling one kernel, printed as a line."""

    kernel: str
    case: str
    spills: int
    text: str


def compiled(target: GPUTarget, cases: Iterable[tuple[str, Callable[[], object]]]) -> Iterator[Compiled]:
    """Compile the kernels that the cases launch; a launch compiles and does not run."""
    triton.runtime.driver.set_active(AbsentDriver(target))
    caught: list[Any] = []
    launch = JITFunction.run

    def warmed(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        caught.append((self.fn.__name__, launch(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = warmed
    for case, action in cases:
        caught.clear()
        action()
        for name, kernel in caught:
            text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
            yield Compiled(name, case, getattr(kernel, "n_spills", None) or 0, text)


def kinds() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield functions that launch each kind of kernel, in bfloat16, with several schemes."""
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    x = weight.bfloat16()
    for scheme in ("int4_wo_32", "uint4_wo_32", "mxfp4", "mxfp6_e2m3", "amdfp4", "nvfp4", "bfp16", "fp8", "int8"):
        quantizer = quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False)
        outer = torch.ones(()) if len(quantizer.levels) > 1 else None
        scales = QParams(torch.ones(quantizer.granularity.scale_shape(tuple(x.shape))), None, outer)
        yield f"{scheme}: found", functools.partial(quantizer.round_to_nearest, x)
        yield f"{scheme}: given", functools.partial(quantizer.fake_quantize, x, scales)
        yield f"{scheme}: codes", functools.partial(quantizer.quantize, x, scales)
        codes = torch.empty(x.shape, dtype=quantizer.stored_level.format.storage_dtype)
        yield f"{scheme}: values", functools.partial(quantizer.dequantize_to, codes, scales, torch.empty_like(x))
    codes = torch.randint(0, 16, (64, 256), dtype=torch.uint8)
    yield "along rows: packed", functools.partial(pack_nibbles, codes, "reorder")
    yield "across rows: packed", functools.partial(pack_nibbles_across, codes, "reorder")
    yield "pairs: packed", functools.partial(pack_two, codes)
    words = torch.zeros(64, 32, dtype=torch.int32)
    yield "along rows: unpacked", functools.partial(unpack_nibbles, words, "reorder", 256, signed=True)
    yield "across rows: unpacked", functools.partial(unpack_nibbles_across, words, "reorder", 256, signed=True)
    yield "pairs: unpacked", functools.partial(unpack_bits, codes, 4, 512, signed=False)
    wt, found = weight.t().contiguous(), factor(torch.eye(256), 0.01)
    for scheme in ("int4_wo_32", "uint4_wo_32", "mxfp4"):
        quantizer = quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False)
        low, high = torch.full((8, 64), -1.0), torch.ones(8, 64)
        grid = WeightGrid([quantizer], [64], wt)
        scales = grid.scales_of_ranges(low, high)
        for order, causal in ((None, None), (torch.arange(256), torch.zeros(256, 256))):
            sweep = functools.partial(ldlq, wt, found, grid.rounder(scales, order), 128, order, causal)
            yield f"{scheme}: columns", sweep


def specs() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield functions that launch a rounding kernel for each spec of `tests.kit.kernel_specs`."""
    for name, (spec, activation) in CASES.items():
        quantizer = quantizer_for(spec, activation=activation)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.randn(6, 128).to(dtype)
            x = x if quantizer.shape_error(tuple(x.shape)) is None else x[:, :96].contiguous()
            for method in ("round_to_nearest", "find_qparams"):
                yield f"{name}, {dtype}: {method}", functools.partial(getattr(quantizer, method), x)


if __name__ == "__main__":
    backend, _, arch = (sys.argv[1:] or ["cuda:90"])[0].partition(":")
    cases = specs() if sys.argv[2:] == ["specs"] else kinds()
    for one in compiled(GPUTarget(backend, int(arch) if arch.isdigit() else arch, 32 if backend == "cuda" else 64), cases):
        print(json.dumps(attrs.asdict(one)), flush=True)
