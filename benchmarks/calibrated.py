"""Measure time, memory, perplexity and divergence of calibrated rounding on a real model.

    python -m benchmarks.calibrated MODEL TEXT_DIR [--runs gptq/int4_wo_64,qronos/mxfp4|table] [--preset
                                    best|reference] [--dtype bfloat16] [--one-thread] [--busy 1] [--repeats 3]
                                    [--no-quality]
                                    [--out docs/data/calibrated.json]

`benchmarks.perplexity` describes the protocol. `ratio` is the time of ``quantize_model`` ÷ the time of one
float forward pass over the calibration tokens. Both are measured in the same process, and the forward time is
the faster of two. `peak` is the growth of resident memory beyond the loaded model ÷ the float32 bytes of one
block's weights, Hessians and activations. Each run has its own process, so runs do not affect each other's
time and memory. Each run prints a line of JSON. The program prints a table at the end.

With ``--one-thread``, times are CPU seconds of one thread. Other work on the machine hardly changes CPU
seconds. With ``--busy N``, each quantization runs a second time beside N busy processes. `busy_ratio` is the
median of the busy times ÷ the median of the quiet ones. The project's bar is 1.6 for one busy process on two
cores.

``--out`` names a file to which the program adds the accuracy of each algorithm and scheme. The documentation
shows `docs/data/calibrated.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from benchmarks.busy import busy_loops
from benchmarks.perplexity import forward_seconds, sequences
from benchmarks.results import Measurement
from quark.base.version import VERSION
from quark.models.hf.loading import load_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.torch import LLMTemplate, ModelQuantizer
from quark_workbench.evaluate import compare

FORWARDS = {"gptq": 2.0, "awq": 3.2, "awq+gptq": 3.5, "qronos": 3.8, "awq+gptq+tuning": 15.0}
"""Most float forwards that a run at int4_wo_64 may take."""
THREAD_FORWARDS = {
    "gptq/int4_wo_64": 1.95,
    "awq/int4_wo_64": 3.0,
    "awq+gptq/int4_wo_64": 3.3,
    "qronos/int4_wo_64": 3.6,
    "none/int8": 1.0,
    "rotation+smoothquant/int8": 4.5,
    "awq+gptq+tuning/int4_wo_64": 12.0,
}
"""Most float forwards that a run may take in CPU seconds of one thread."""
BFLOAT16_FORWARDS = {
    "none/int4_wo_64": 0.2,
    "gptq/int4_wo_64": 4.0,
    "awq/int4_wo_64": 6.5,
    "awq+gptq/int4_wo_64": 7.0,
    "qronos/int4_wo_64": 8.5,
    "none/int8": 1.1,
}
"""Most bfloat16 forwards that a run of a bfloat16 model may take. Solvers and statistics stay in float32."""
BUSY = 1.6
"""Largest ratio of a run's time beside one busy process to its time alone, on two cores."""
ACCURACY = {
    "awq+gptq+tuning/int4_wo_64": (33.8, 0.14),
    "awq+gptq+tuning/mxfp4": (48.0, None),
    "awq+gptq+tuning/nvfp4": (36.5, None),
    "rotation+smoothquant+gptq/int8": (32.5, None),
}
"""Largest perplexity and KL divergence of SmolLM2-135M by run; the last run uses R2 and R4."""
RUNS = "gptq/int4_wo_64,gptaq/int4_wo_64,qronos/int4_wo_64"
TABLE = [f"{a}/{s}" for s in ("int4_wo_64", "uint4_wo_64", "mxfp4", "nvfp4", "mxfp6_e3m2") for a in ("none", "gptq", "gptaq", "qronos")]


def measure(args: argparse.Namespace, algorithm: str, scheme: str) -> dict[str, object]:
    """Quantize fresh copies of the model, and return time, memory and accuracy."""
    tokenizer = load_tokenizer(args.model)
    calib = sequences(tokenizer, args.text / "foldoc.txt", 200_000, 8, 512)
    model = load_model(args.model, args.dtype)
    now = time.process_time if args.one_thread else time.perf_counter
    torch.set_num_threads(1 if args.one_thread else torch.get_num_threads())
    floor = min(forward_seconds(model, calib, now) for _ in range(2))
    allowed = _allowed_bytes(model, calib.numel())
    before = _resident()
    quiet, busy = [_quantize(args, algorithm, scheme, model, calib)], []
    grown = (_peak() - before) / allowed
    for repeat in range(args.repeats):
        quiet += [_quantize(args, algorithm, scheme, load_model(args.model, args.dtype), calib)] if repeat else []
        if args.busy:
            with busy_loops(args.busy):
                busy.append(_quantize(args, algorithm, scheme, load_model(args.model, args.dtype), calib))
    took = statistics.median(quiet)
    result = {"algorithm": algorithm, "scheme": scheme, "preset": args.preset, "dtype": args.dtype, "ratio": round(took / floor, 2)}
    result |= {"seconds": round(took, 2), "peak": round(grown, 2), "one_thread": args.one_thread}
    if args.busy:
        result |= {"busy": args.busy, "busy_seconds": round(statistics.median(busy), 2)}
        result |= {"busy_ratio": round(statistics.median(busy) / took, 2)}
    if not args.no_quality:
        rows = [sequences(tokenizer, args.text / f, at, 8, 512) for f, at in (("foldoc.txt", 3_500_000), ("devil.txt", 20_000))]
        found = compare(model, load_model(args.model, args.dtype), list(torch.cat(rows).split(4)))
        result |= {"perplexity": round(found.perplexity, 3), "mean_kl": round(found.mean_kl, 4), "top1": round(found.top1_agreement, 4)}
    return result


def _quantize(args: argparse.Namespace, algorithm: str, scheme: str, model: torch.nn.Module, calib: Tensor) -> float:
    """Quantize ``model`` in place, and return the wall time, or the CPU time with ``--one-thread``."""
    config = LLMTemplate.get(model.config.model_type).get_config(scheme=scheme, algorithm=_names(algorithm) or None)
    options = {"preset": args.preset, **json.loads(args.options)}
    config.algo_config = [_with_options(settings, options) for settings in config.algo_config or []] or None
    now = time.process_time if args.one_thread else time.perf_counter
    start = now()
    ModelQuantizer(config).quantize_model(model, list(calib.split(1)))
    return now() - start


def _with_options(settings: Any, options: Mapping[str, Any]) -> Any:
    """Return ``settings`` with new values for each option that is one of their fields."""
    return attrs.evolve(settings, **{name: value for name, value in options.items() if hasattr(settings, name)})


def _names(algorithm: str) -> list[str]:
    return [] if algorithm == "none" else algorithm.split("+")


def _resident() -> float:
    """Return the resident memory in bytes, and reset the recorded peak to it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _peak() -> float:
    """Return the peak of the resident memory since the last call of `_resident`, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _allowed_bytes(model: torch.nn.Module, tokens: int) -> float:
    """Return how many bytes one block's weights, Hessians, and layer inputs and outputs take in float32."""
    block = next(iter(model.get_submodule("model.layers").children()))
    linears = {n.rsplit(".", 1)[-1]: m for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)}
    inputs = [m.in_features for n, m in linears.items() if n not in ("k_proj", "v_proj", "up_proj")]  # they share inputs
    outputs = [m.out_features for m in linears.values()]
    weights = sum(p.numel() for p in block.parameters())
    return 4.0 * (weights + sum(k * k for k in inputs) + tokens * (sum(inputs) + sum(outputs)))


def measurements(results: Sequence[Mapping[str, Any]]) -> list[Measurement]:
    """Return the figures of some runs, each with a bar if it has one."""
    found = []
    for one in results:
        algorithm, scheme, case = one["algorithm"], one["scheme"], f"{one['algorithm']}, {one['scheme']}"
        is_bfloat16, floor = one.get("dtype") == "bfloat16", "one float forward over the calibration tokens"
        forwards = FORWARDS.get(algorithm) if scheme == "int4_wo_64" and not is_bfloat16 else None
        name = "calibrated rounding"
        if one.get("one_thread"):
            bars_of_thread = BFLOAT16_FORWARDS if is_bfloat16 else THREAD_FORWARDS
            name, forwards = f"{name}: CPU seconds of one thread", bars_of_thread.get(f"{algorithm}/{scheme}")
        if is_bfloat16:
            name, floor = f"{name}, bfloat16", "one bfloat16 forward over the calibration tokens"
        found.append(Measurement(name, case, one["ratio"], "×", floor, forwards))
        if "busy_ratio" in one:
            bar = BUSY if algorithm in FORWARDS else None
            found.append(Measurement("calibrated rounding: beside a busy process", case, one["busy_ratio"], "×", "the same run alone", bar))
        if "perplexity" in one:
            bars = ACCURACY.get(f"{algorithm}/{scheme}", (None, None))
            found.append(Measurement("accuracy: perplexity", case, one["perplexity"], "perplexity", "the float model", bars[0]))
            found.append(Measurement("accuracy: divergence", case, one["mean_kl"], "nats", "the float model", bars[1]))
    return found


def main(arguments: list[str] | None = None) -> list[Measurement]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--runs", default=RUNS, help="ALGORITHM/SCHEME,…; algorithms joined by +, none for round-to-nearest; or: table")
    parser.add_argument("--preset", default="best")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--options", default="{}", help="further fields of the algorithms' settings, as JSON")
    parser.add_argument("--one-thread", action="store_true", help="compute with one thread, and count its CPU seconds")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="measure beside N busy processes too, in alternation")
    parser.add_argument("--repeats", type=int, default=1, help="number of times to quantize; the median is reported")
    parser.add_argument("--no-quality", action="store_true", help="time and memory only")
    parser.add_argument("--out", type=Path, help="file of figures to which the accuracy of each run is added")
    args = parser.parse_args(arguments)
    logging.getLogger("quark").setLevel(logging.ERROR)
    runs = TABLE if args.runs == "table" else args.runs.split(",")
    if len(runs) == 1:
        found = measure(args, *runs[0].split("/"))
        print(json.dumps(found), flush=True)
        if args.out:
            add_accuracy(args, found)
        return measurements([found])
    given = arguments if arguments is not None else sys.argv[1:]
    results = [json.loads(line) for line in [_in_own_process([*given, "--runs", run]) for run in runs] if line]
    if not args.no_quality:
        print("\n".join(_table(results)))
    return measurements(results)


def add_accuracy(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Store the accuracy of one run in the file of figures, under its algorithm and scheme."""
    data: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"accuracy": {}}
    data |= {"command": "python -m benchmarks.calibrated SMOLLM2_135M TEXT_DIR --runs RUN,… --out docs/data/calibrated.json"}
    data |= {"model": f"SmolLM2-135M, {args.dtype}", "preset": args.preset, "quark": VERSION, "torch": str(torch.__version__)}
    row = data["accuracy"].setdefault(found["algorithm"], {})
    row[found["scheme"]] = {name: found[name] for name in ("perplexity", "mean_kl", "top1")}
    args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _in_own_process(arguments: list[str]) -> str:
    """Measure a run in a new process; print and return the run's line of JSON.

    If the run failed, the line is empty.
    """
    done = subprocess.run([sys.executable, "-m", "benchmarks.calibrated", *arguments], check=False, stdout=subprocess.PIPE, text=True)
    line = done.stdout.strip()
    print(line, flush=True)
    return line


def _table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table with a row for each algorithm and a column for each scheme.

    A cell has perplexity, divergence and top-1 agreement.
    """
    found = {(r["algorithm"], r["scheme"]): "{perplexity:.2f} / {mean_kl:.3f} / {top1:.3f}".format(**r) for r in results}
    schemes = list(dict.fromkeys(scheme for _, scheme in found))
    yield " | ".join(["|", *schemes, ""]).strip()
    yield "|---" * (len(schemes) + 1) + "|"
    for algorithm in dict.fromkeys(name for name, _ in found):
        yield " | ".join([f"| {algorithm}", *(found.get((algorithm, scheme), "") for scheme in schemes), ""]).strip()


if __name__ == "__main__":
    main()
