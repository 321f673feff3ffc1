"""Time round-to-nearest from loading to the finished export; the floor is a copy with safetensors.

    python -m benchmarks.rtn MODEL [--schemes int4_wo_64,mxfp4_weight_only] [--routes memory,disk] [--runs 5]

MODEL is a float checkpoint in Hugging Face form. Runs of copy and quantization alternate. The route
``memory`` quantizes a model in memory; the route ``disk`` quantizes block by block from disk to disk. The
program prints medians and their ratio. Times exclude the imports of torch and transformers.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.results import Measurement
from quark.config.model import QConfig
from quark.errors import QuarkError
from quark.models.hf.loading import load_model
from quark.models.hf.model_config import model_config
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors


def copy_checkpoint(source: Path, out: Path) -> None:
    """Read every tensor of every shard, and write all of them to ``out``."""
    out.mkdir()
    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            save_file({name: file.get_tensor(name) for name in file.keys()}, out / shard.name, metadata={"format": "pt"})  # noqa: SIM118


def in_memory(source: Path, out: Path, config_of: Callable[[str], QConfig]) -> None:
    """Load a model, quantize it in memory, and export it."""
    model = load_model(source)
    ModelQuantizer(config_of(model.config.model_type)).quantize_model(model)
    export_safetensors(model, str(out))


def from_disk(source: Path, out: Path, config_of: Callable[[str], QConfig]) -> None:
    """Quantize a checkpoint from disk to disk, block by block."""
    quantize_checkpoint(source, out, config_of(model_config(source).model_type))


BAR = 3.0
"""Bar of the route through memory, in copies."""
ROUTES = {"memory": in_memory, "disk": from_disk}


def seconds(action: Callable[[Path], None]) -> float:
    """Return the wall time of ``action`` on a fresh path."""
    with tempfile.TemporaryDirectory() as tmp:
        start = time.perf_counter()
        action(Path(tmp) / "out")
        return time.perf_counter() - start


def weights_only(scheme: str) -> Callable[[str], QConfig]:
    """Return a function from model type to a configuration that quantizes only weights.

    Such a configuration needs no calibration data.
    """

    def make(model_type: str) -> QConfig:
        from dataclasses import replace

        config = LLMTemplate.get(model_type).get_config(scheme=scheme)
        return replace(config, global_quant_config=replace(config.global_quant_config, input_tensors=None))

    return make


def main(arguments: list[str] | None = None) -> list[Measurement]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--schemes", default="int4_wo_64,fp8,mxfp4_weight_only")
    parser.add_argument("--routes", default=",".join(ROUTES))
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(arguments)
    logging.getLogger("quark").setLevel(logging.ERROR)
    actions: dict[str, Callable[[Path], None]] = {"copy": lambda out: copy_checkpoint(args.model, out)}
    for scheme in args.schemes.split(","):
        for route in args.routes.split(","):
            actions[f"{scheme} {route}"] = lambda out, s=scheme, r=route: ROUTES[r](args.model, out, weights_only(s))
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for run in range(args.runs + 1):
        for name, action in actions.items():
            took = seconds(action)
            if run:  # the first round warms caches
                taken[name].append(took)
    floor = statistics.median(taken["copy"])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {args.runs}")
    measured = []
    for name, values in taken.items():
        if name != "copy":
            case = f"{name.replace(' ', ', from ')} ({args.model.name})"
            bar = BAR if name.endswith(" memory") else None
            measured.append(
                Measurement("round-to-nearest", case, statistics.median(values) / floor, "×", "a copy through safetensors", bar)
            )
        print(f"{name:26s} {statistics.median(values):7.2f} s   {statistics.median(values) / floor:5.2f}× a copy")
    return measured


if __name__ == "__main__":
    try:
        main()
    except QuarkError as error:
        raise SystemExit(f"benchmarks.rtn: {error}") from error
