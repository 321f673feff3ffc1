"""Quantize random checkpoints of large models on an accelerator, and print one table.

    python -m benchmarks.accelerator [CASE ...] [--device cuda] [--minutes 10] [--results FILE]
        [--samples 128] [--length 2048] [--activation-memory BYTES] [--directory DIR]

Each case writes a checkpoint of random bfloat16 weights, and forecasts the cost of the run as ``quark plan``
does. It then quantizes the checkpoint from disk to disk, and calibrates on random tokens. When ``--minutes``
have passed, the program starts no further case. Each line of the table has:

* the seconds of the run, the mean seconds of a block after the first, and the seconds of each phase;
* the peak of the device's memory;
* the floor, in seconds: the FLOPs of forward passes and Hessians ÷ the measured FLOP/s of bfloat16 matrix
  products, plus the FLOPs of the solver ÷ the measured FLOP/s of float32 matrix products. If copying the
  checkpoint takes longer, the floor is the time of the copy;
* the ratios seconds ÷ floor, seconds ÷ forecast seconds, and memory ÷ forecast memory.

The bars are meant for 128 sequences of 2048 tokens on a GPU as fast as an H100. ``tiny`` and ``tiny-mixture``
run anywhere in seconds, and show only that the program works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from benchmarks.random_checkpoints import SHAPES, write_random_checkpoint
from quark.config.model import QConfig
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_workbench.planning import Calibration, plan
from quark_workbench.planning.estimate import Estimate
from quark_workbench.report import ReportOptions

__all__ = ["CASES", "Case", "Measured", "Rates", "main", "measured", "table"]

_COPIED = 4_000_000_000
"""Most bytes that are copied to measure the disk."""


@attrs.frozen
class Case:
    """A run to measure, and the limits (bars) that it must keep.

    Attributes:
        shape: A name in `SHAPES`.
        layers: The number of decoder blocks; None for all.
        algorithms: Names of algorithms joined by ``+``; empty for round-to-nearest.
        scheme: The scheme.
        seconds: The most seconds that the run may take.
        block_seconds: The most seconds that a block after the first may take.
        peak: The most bytes that the run may allocate on the device.
        share_of_copy: The least allowed throughput of the run ÷ the throughput of copying the checkpoint.
    """

    shape: str
    layers: int | None = None
    algorithms: str = "gptq"
    scheme: str = "int4_wo_64"
    seconds: float | None = None
    block_seconds: float | None = None
    peak: int | None = None
    share_of_copy: float | None = None

    def config(self) -> QConfig:
        """Return the quantization configuration of the case."""
        template = LLMTemplate.get(str(SHAPES[self.shape]["model_type"]))
        return template.get_config(scheme=self.scheme, algorithm=self.algorithms.split("+") if self.algorithms else None)


CASES: Mapping[str, Case] = {
    "8b-gptq": Case("8b", seconds=30, peak=16_000_000_000),
    "8b-awq-gptq": Case("8b", algorithms="awq+gptq", seconds=40, peak=16_000_000_000),
    "8b-tuning": Case("8b", layers=3, algorithms="gptq+tuning", block_seconds=2.5),
    "mixture-gptq": Case("qwen3-30b-a3b", layers=3),
    "wide-mixture-gptq": Case("deepseek-v3", layers=1),
    "120b-nearest": Case("gpt-oss-120b", layers=1, algorithms="", scheme="mxfp4_weight_only", share_of_copy=0.8),
    "tiny": Case("tiny"),
    "tiny-mixture": Case("tiny-mixture"),
}
_DEFAULT = [name for name in CASES if not name.startswith("tiny")]


@attrs.frozen
class Rates:
    """The speed of the device and of the disk.

    Attributes:
        bfloat16: FLOP/s of a bfloat16 product.
        float32: FLOP/s of a float32 product.
        copy: Bytes/s of copying the files of the checkpoint.
    """

    bfloat16: float
    float32: float
    copy: float

    def floor(self, estimate: Estimate, size: int) -> float:
        """Return the least seconds that a run can take if it copies ``size`` bytes."""
        work = estimate.work
        return max((work.forward + work.statistics) / self.bfloat16 + work.solver / self.float32, size / self.copy)


@attrs.frozen
class Measured:
    """The cost of a run.

    Attributes:
        seconds: Seconds of the whole run, including reading and writing the checkpoint.
        block: Mean seconds of a block, without the first block if there are several.
        phases: Seconds that the host spends in each phase, from the report. In one phase, the host may wait
            for the device to finish an earlier phase.
        peak: The most bytes allocated on the device; 0 if the device is the CPU.
        size: Bytes of the checkpoint.
        floor: The least seconds that such a run can take (see `Rates.floor`).
        forecast: Seconds that the plan forecasts.
        forecast_peak: The peak that the plan forecasts, in bytes; 0 if the device is the CPU.
        copy: Seconds of copying the checkpoint.
    """

    seconds: float
    block: float
    phases: Mapping[str, float]
    peak: int
    size: int
    floor: float
    forecast: float
    forecast_peak: int
    copy: float

    def missed(self, case: Case) -> list[str]:
        """Return a text for each bar of the case that the run misses."""
        figures = [
            ("seconds", self.seconds, case.seconds),
            ("seconds a block", self.block, case.block_seconds),
            ("bytes", self.peak, case.peak),
            ("times a copy", self.seconds / self.copy, case.share_of_copy and 1 / case.share_of_copy),
        ]
        return [f"{value:.3g} {name}, wanted at most {bar:.3g}" for name, value, bar in figures if bar is not None and value > bar]


def measured(case: Case, source: Path, device: str, data: list[Tensor], activation_memory: int | None = None) -> Measured:
    """Forecast the cost of a case, run and measure it, and delete the quantized checkpoint.

    Args:
        case: The case.
        source: The float checkpoint of the case.
        device: The device of the run.
        data: Calibration sequences, ``[1, tokens]``.
        activation_memory: Limit for activations in bytes, as in the configuration.
    """
    target = torch.device(device)
    module = None if target.type == "cpu" else torch.get_device_module(target)
    config = attrs.evolve(case.config(), activation_memory=activation_memory)
    rates = _rates(source, target)
    planned = plan(source, config, calibration=Calibration(len(data), data[0].shape[1]), device=device)
    assert planned.estimate is not None, planned.refusals
    if module is not None:
        module.empty_cache()
        module.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(dir=source.parent) as directory:
        started = time.perf_counter()
        quantize_checkpoint(
            source, Path(directory) / "out", config, data if case.algorithms else None, device=device, report=ReportOptions()
        )
        if module is not None:
            module.synchronize()
        seconds = time.perf_counter() - started
        times = json.loads((Path(directory) / "out" / "quark_report.json").read_text(encoding="utf-8"))["time"]
    blocks = [sum(row["seconds"].values()) for row in times["blocks"] if not row["block"].startswith("(")]
    later, size = blocks[1:] or blocks, _size(source)
    return Measured(
        seconds=seconds,
        block=sum(later) / len(later),
        phases={row["phase"]: float(row["seconds"]) for row in times["phases"]},
        peak=0 if module is None else int(module.max_memory_allocated()),
        size=size,
        floor=rates.floor(planned.estimate, size),
        forecast=sum(planned.estimate.seconds.values()),
        forecast_peak=planned.estimate.device_bytes,
        copy=size / rates.copy,
    )


def _rates(source: Path, device: torch.device) -> Rates:
    size = 8192 if device.type != "cpu" else 1024
    products = [2 * size**3 / _least_seconds(_product(size, dtype, device), device) for dtype in (torch.bfloat16, torch.float32)]
    return Rates(*products, copy=_copied_per_second(source))


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    return lambda: matrix @ matrix


def _least_seconds(work: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        found.append(time.perf_counter() - started)
    return min(found)


def _copied_per_second(source: Path) -> float:
    copied, started = 0, time.perf_counter()
    with tempfile.TemporaryDirectory(dir=source.parent) as directory:
        for path in sorted(source.glob("*.safetensors")):
            shutil.copyfile(path, Path(directory) / path.name)
            copied += path.stat().st_size
            if copied >= _COPIED:
                break
        return copied / (time.perf_counter() - started)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def table(results: Mapping[str, Measured]) -> Iterator[str]:
    """Yield the lines of the table that the program prints."""
    yield "| case | seconds | a block | seconds by phase | device, GiB | floor, s | ÷ floor | ÷ forecast | bars |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, one in results.items():
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in one.phases.items())
        forecast = f"{one.seconds / one.forecast:.2f}" + (f", memory {one.peak / one.forecast_peak:.2f}" if one.forecast_peak else "")
        held = f"{one.peak / 2**30:.1f}" if one.peak else ""
        bars = "; ".join(one.missed(CASES[name])) or "met"
        yield (
            f"| {name} | {one.seconds:.1f} | {one.block:.2f} | {phases} | {held} | {one.floor:.1f} | "
            f"{one.seconds / one.floor:.2f} | {forecast} | {bars} |"
        )


def _versions(device: str) -> dict[str, str]:
    names = {"torch": torch.__version__, "transformers": importlib.metadata.version("transformers")}
    is_cuda = torch.device(device).type == "cuda"
    return names | {"device": torch.cuda.get_device_name() if is_cuda else device}


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return 1 if a case misses a bar or does not run."""
    given = _parsed(arguments)
    kept = given.directory or Path(tempfile.mkdtemp(prefix="quark-accelerator-"))
    results: dict[str, Measured] = {}
    started = time.perf_counter()
    try:
        for name in given.cases:
            case = CASES[name]
            if time.perf_counter() - started > 60 * given.minutes:
                print(f"{name}: does not run, since {given.minutes} minutes have passed", flush=True)
                continue
            source = kept / f"{case.shape}-{case.layers or 'all'}"
            if not (source / "config.json").exists():
                write_random_checkpoint(source, case.shape, case.layers)
            generator = torch.Generator().manual_seed(0)
            vocabulary = int(SHAPES[case.shape]["vocab_size"])
            data = [torch.randint(0, vocabulary, (1, given.length), generator=generator) for _ in range(given.samples)]
            results[name] = measured(case, source, given.device, data, given.activation_memory)
            print(f"{name}: {json.dumps(attrs.asdict(results[name]))}", flush=True)
            later = [CASES[other] for other in given.cases if other not in results]
            is_needed = (case.shape, case.layers) in [(other.shape, other.layers) for other in later]
            if given.directory is None and not is_needed:
                shutil.rmtree(source)
    finally:
        if given.directory is None:
            shutil.rmtree(kept, ignore_errors=True)
    versions = _versions(given.device)
    print("\n".join([", ".join(f"{name} {value}" for name, value in versions.items()), "", *table(results)]))
    if given.results is not None:
        rows = {name: attrs.asdict(one) for name, one in results.items()}
        given.results.write_text(json.dumps({"versions": versions, "cases": rows}, indent=1) + "\n", encoding="utf-8")
    return int(len(results) < len(given.cases) or any(one.missed(CASES[name]) for name, one in results.items()))


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)}; default: all but the tiny ones")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="start no case after this time")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--activation-memory", type=int, default=None, help="limit for activations in bytes, as in the config")
    parser.add_argument("--directory", type=Path, default=None, help="directory for checkpoints; they are kept")
    parser.add_argument("--results", type=Path, default=None, help="JSON file for the figures")
    given = parser.parse_args(arguments)
    given.cases = given.cases or _DEFAULT
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(CASES)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
