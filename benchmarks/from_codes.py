"""Measure memory and time of models that run from codes, relative to the same models with unpacked weights.

    python -m benchmarks.from_codes [MODEL] [--shape 1b] [--schemes int4_wo_32,fp8] [--prompt 512]

MODEL is a float checkpoint. Without it, the program writes a random Llama of ``--shape``, and measures only
memory. All weights are rounded to nearest, also those of MODEL's head. The program deletes the checkpoints at
the end.

Memory: a fresh process loads a checkpoint and computes the logits of 64 tokens in the checkpoint's dtype. The
figure is the process's peak resident memory (VmHWM, Linux), without the memory of the imports, ÷ the size of
the checkpoint's files. The peak includes pages of memory-mapped files. The bar is 1.15.

Loading: the figure is CPU seconds of loading ÷ CPU seconds of reading the files.

Time: the figure is the seconds that one thread takes to compute float32 logits ÷ the seconds with unpacked
weights. There is one figure for a prompt, and one for a single token. The seconds are medians of alternating
runs. The bar of a prompt is 1 / 0.9. The line "least operations" is a floor: the time of the unpacked model
plus the time of the fewest torch operations that can make float32 weights from 4-bit codes. These operations
are two shifts, a conversion and a product, in slices that fit the cache.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.disk_to_disk import status
from benchmarks.random_checkpoints import SHAPES, write_random_checkpoint
from benchmarks.results import Measurement
from benchmarks.rtn import weights_only
from quark.models.hf.json_files import read_json
from quark.models.hf.loading import load_model
from quark.runs import quantize_checkpoint

SCHEMES = "int4_wo_32,mxfp4_weight_only,fp8,nvfp4,mx6"
FILES, PROMPT = 1.15, 1 / 0.9
SLICE = 1 << 18


def child(checkpoint: Path, *, packed: bool) -> dict[str, float]:
    """Load a checkpoint in this process, and compute logits.

    Return the peak memory, the seconds of loading, and the seconds of reading the files.
    """
    import transformers.models.gemma3.modeling_gemma3
    import transformers.models.llama.modeling_llama  # noqa: F401 - counted with the imports

    imported, start = status("VmRSS"), time.process_time()
    model = load_model(checkpoint, packed=packed)
    loaded = time.process_time() - start
    with torch.inference_mode():
        model(torch.arange(3, 67)[None], use_cache=False)
    peak, start = status("VmHWM") - imported, time.process_time()
    for path in checkpoint.glob("*.safetensors"):
        path.read_bytes()
    return {"peak": peak, "seconds": loaded, "reading": time.process_time() - start}


def memory(checkpoint: Path, scheme: str, model: str) -> Iterator[Measurement]:
    """Yield the peak memory of the model that runs from codes, the same unpacked, and the time of loading."""
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    case, found = f"{scheme} ({model})", {}
    for way in ("packed", "unpacked"):
        command = [sys.executable, "-m", "benchmarks.from_codes", str(checkpoint), "--child", way]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    packed, unpacked = found["packed"], found["unpacked"]
    yield Measurement("from codes: peak memory", case, packed["peak"] / size, "×", "the files of the checkpoint", FILES)
    yield Measurement("from codes: peak memory", f"{case}, unpacked", unpacked["peak"] / size, "×", "the files of the checkpoint")
    yield Measurement("from codes: loading", case, packed["seconds"] / packed["reading"], "×", "reading the files")


def speed(checkpoint: Path, scheme: str, model: str, prompt: int) -> Iterator[Measurement]:
    """Yield the time from codes ÷ the time of the unpacked model, for a prompt and for one token."""
    packed, unpacked = (load_model(checkpoint, "float32", packed=is_packed) for is_packed in (True, False))
    floor, memory = "the model with weights in memory", "from codes: time"
    for length, repeats, bar in ((prompt, 3, PROMPT), (1, 9, None)):
        ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))
        ways: dict[str, Callable[[], object]] = {
            "": lambda ids=ids: packed(ids, use_cache=False),
            "unpacked": lambda ids=ids: unpacked(ids, use_cache=False),
        }
        if length == 1 and "4" in scheme:
            ways["least operations"] = lambda: _least_unpacking(unpacked)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats + 1):
            for way, work in ways.items():
                times[way].append(_seconds(work))
        median = {way: statistics.median(taken[1:]) for way, taken in times.items()}
        case = f"{scheme} ({model}), {'one token' if length == 1 else f'{length} tokens'}"
        yield Measurement(memory, case, median[""] / median["unpacked"], "×", floor, bar)
        if "least operations" in median:
            yield Measurement(memory, f"{case}, least operations", 1 + median["least operations"] / median["unpacked"], "×", floor)


def _seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    with torch.inference_mode():
        work()
    return time.thread_time() - start


def _least_unpacking(model: nn.Module) -> None:
    """Compute as many float32 numbers from 4-bit codes as a model's linear layers have weights."""
    words, places = torch.zeros(SLICE // 8, 1, dtype=torch.int32), torch.arange(28, -4, -4, dtype=torch.int32)
    whole, values, scales = torch.empty(SLICE // 8, 8, dtype=torch.int32), torch.empty(SLICE // 32, 32), torch.ones(SLICE // 32, 1)
    count = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    for _ in range(-(-count // SLICE)):
        torch.bitwise_left_shift(words.view(-1, 1024)[:, None], places[:, None], out=whole.view(-1, 8, 1024))
        values.view(-1).copy_(whole.bitwise_right_shift_(28).view(-1))
        values.mul_(scales)


def checkpoints(source: Path, schemes: str, directory: Path, *, with_head: bool) -> Iterator[tuple[str, Path]]:
    """Yield each scheme, and a checkpoint quantized in this scheme.

    The checkpoint is deleted when the next scheme is requested.
    """
    model_type = read_json(source / "config.json")["model_type"]
    for scheme in schemes.split(","):
        with tempfile.TemporaryDirectory(dir=directory) as out:
            config = weights_only(scheme)(model_type)
            quantize_checkpoint(source, Path(out) / "out", replace(config, exclude=[]) if with_head else config)
            yield scheme, Path(out) / "out"


def main(arguments: list[str] | None = None) -> list[Measurement]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--directory", type=Path, help="directory for checkpoints; default: the system's temporary directory")
    parser.add_argument("--child", choices=("packed", "unpacked"), help="measure one checkpoint in this process, and print JSON")
    args: Any = parser.parse_args(arguments)
    logging.getLogger("quark").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if args.child:
        print(json.dumps(child(args.model, packed=args.child == "packed")))
        return []
    found: list[Measurement] = []
    with tempfile.TemporaryDirectory(dir=args.directory) as temporary:
        source = args.model or write_random_checkpoint(Path(temporary) / "source", args.shape)
        name = args.shape if args.model is None else source.name
        for scheme, checkpoint in checkpoints(source, args.schemes, Path(temporary), with_head=args.model is not None):
            rows = [*memory(checkpoint, scheme, name)]
            rows += [] if args.model is None else speed(checkpoint, scheme, name, args.prompt)
            for row in rows:
                print(
                    f"{row.benchmark:24s} {row.case:50s} {row.value:6.2f}× {row.floor}{'' if row.bar is None else f', bar {row.bar:.2f}'}",
                    flush=True,
                )
            found += rows
    return found


if __name__ == "__main__":
    main()
