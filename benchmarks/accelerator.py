"""Quantize a random Llama-3-8B on an accelerator, block by block: ``python -m benchmarks.accelerator``.

    python -m benchmarks.accelerator [--device cuda] [--shape 8b] [--layers 32] [--samples 128] [--length
    2048] [--runs gptq awq+gptq …] [--activation-memory BYTES]

A checkpoint of random bfloat16 weights is written once, to ``--directory``. Each run reads it, calibrates on
random tokens and writes int4 in groups of 64. It prints the seconds, also by phase, and the peak of the
device's memory. Beside the peak are the sizes of one block, of the tensors outside of the blocks, and of the
largest statistic. The bars apply only to 8B with all its layers on one GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from benchmarks.random_llama import SHAPES, write_random_llama
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_workbench.report import ReportOptions

__all__ = ["BARS", "RUNS", "TINY", "Measured", "main", "measured"]

RUNS = ("gptq", "awq+gptq", "gptq+tuning")
BARS = {"gptq": 90.0, "awq+gptq": 150.0}
"""Most seconds of a run of the shape 8b, 128 sequences of 2048 tokens, on one GPU of the size of an H100."""
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
"""A shape that any machine quantizes in seconds. It shows only that the program works."""


@attrs.frozen
class Measured:
    """The cost of a run.

    Attributes:
        run: Its algorithms, joined by ``+``.
        seconds: Seconds of the whole run, with reading and writing.
        phases: Seconds by phase, from the report: time of the host. It may wait in one phase for work of an
            earlier one.
        peak: Most bytes on the device; 0 if that is the CPU.
        parts: Bytes that must be on the device: one block, the tensors outside of the blocks, the largest
            Hessian.
    """

    run: str
    seconds: float
    phases: dict[str, float]
    peak: int
    parts: dict[str, int]


def measured(source: Path, algorithms: str, device: str, data: list[Tensor], activation_memory: int | None = None) -> Measured:
    """Run and measure; delete the output."""
    target = torch.device(device)
    module = None if target.type == "cpu" else torch.get_device_module(target)
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm=algorithms.split("+"))
    config = attrs.evolve(config, activation_memory=activation_memory)
    if module is not None:
        module.empty_cache()
        module.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(dir=source.parent) as directory:
        started = time.perf_counter()
        quantize_checkpoint(source, Path(directory) / "out", config, data, device=device, report=ReportOptions())
        if module is not None:
            module.synchronize()
        seconds = time.perf_counter() - started
        phases = _phases(Path(directory) / "out")
    peak = 0 if module is None else int(module.max_memory_allocated())
    return Measured(algorithms, seconds, phases, peak, _parts(source))


def _phases(out: Path) -> dict[str, float]:
    """Return the seconds of each phase, of the report."""
    report = json.loads((out / "quark_report.json").read_text(encoding="utf-8"))
    return {row["phase"]: float(row["seconds"]) for row in report["time"]["phases"]}


def _parts(source: Path) -> dict[str, int]:
    sizes = json.loads((source / "config.json").read_text(encoding="utf-8"))
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    of_keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    block = 2 * (2 * hidden * hidden + 2 * hidden * of_keys + 3 * hidden * inner + 2 * hidden)
    return {"one block": block, "outside": 2 * (2 * sizes["vocab_size"] * hidden + hidden), "largest Hessian": 4 * inner**2}


def _lines(result: Measured, bar: float | None) -> list[str]:
    held = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in result.parts.items())
    lines = [f"{result.run}: {result.seconds:.1f} s" + ("" if bar is None else f" (at most {bar:.0f})")]
    lines += [f"  {name}: {seconds:.1f} s" for name, seconds in result.phases.items()]
    if result.peak:
        lines.append(f"  peak of the device: {result.peak / 2**20:.0f} MiB; {held}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="8b", choices=[*SHAPES, "tiny"])
    parser.add_argument("--layers", type=int, default=None, help="number of decoder blocks; default: as in the shape")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--runs", nargs="+", default=list(RUNS))
    parser.add_argument("--activation-memory", type=int, default=None, help="limit for activations in bytes, as in the config")
    parser.add_argument("--directory", type=Path, default=None, help="directory for the checkpoint, which stays there")
    given = parser.parse_args(arguments)
    SHAPES.setdefault("tiny", TINY)
    kept = given.directory or Path(tempfile.mkdtemp(prefix="quark-accelerator-"))
    try:
        source = kept / f"{given.shape}-{given.layers or SHAPES[given.shape]['num_hidden_layers']}"
        if not (source / "config.json").exists():
            write_random_llama(source, given.shape, given.layers)
        generator = torch.Generator().manual_seed(0)
        vocabulary = SHAPES[given.shape]["vocab_size"]
        data = [torch.randint(0, vocabulary, (1, given.length), generator=generator) for _ in range(given.samples)]
        is_whole = (given.shape, given.layers, given.samples, given.length) == ("8b", None, 128, 2048) and given.device != "cpu"
        is_met = True
        for run in given.runs:
            result, bar = measured(source, run, given.device, data, given.activation_memory), BARS.get(run) if is_whole else None
            print("\n".join(_lines(result, bar)), flush=True)
            is_met &= bar is None or result.seconds <= bar
        return 0 if is_met else 1
    finally:
        if given.directory is None:
            shutil.rmtree(kept, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
