"""Measure perplexity, KL divergence, size and time of every scheme on a real model.

    python -m benchmarks.perplexity MODEL TEXT_DIR [--schemes int4_wo_64,fp8]

The program computes in float32 on the CPU. Calibration uses 8 sequences of 512 tokens from
TEXT_DIR/foldoc.txt (from character 200,000 on). Evaluation uses 16 sequences of 512 tokens: 8 from foldoc.txt
(from character 3,500,000 on) and 8 from devil.txt (from character 20,000 on). `ratio` is quantization time ÷
the time of one float forward pass over the calibration tokens in the same run. The program prints a line of
JSON for each scheme.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quark.models.hf.loading import load_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_workbench.evaluate import compare, perplexity

SCHEMES = (
    "int4_wo_32 int4_wo_64 int4_wo_128 int4_wo_per_channel int4_wa_64 uint4_wo_32 uint4_wo_64 uint4_wo_128 uint4_wo_per_channel "
    "int8 fp8 ptpc_fp8 mxfp4 mxfp4_weight_only mxfp6_e3m2 mxfp6_e2m3 mxfp4_mxfp6_e2m3 mxfp4_fp8 amdfp4 amdfp4_g32 nvfp4 amdfp4_global16 "
    "amdfp4_global32 int4_fp8 mx6 mx9 bfp16"
)


def sequences(tokenizer: object, path: Path, start: int, count: int, length: int) -> Tensor:
    """Return ``count`` windows of ``length`` tokens, ``[count, length]``, from character ``start`` on."""
    text = path.read_text(encoding="utf-8", errors="replace")[start : start + count * length * 8]
    return tokenizer(text, return_tensors="pt")["input_ids"][0][: count * length].view(count, length)


@torch.no_grad()
def forward_seconds(model: torch.nn.Module, calib: Tensor, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of float forward passes over the tokens, one sequence at a time.

    ``now`` is the clock that measures the seconds.
    """
    model(calib[:1])
    start = now()
    for row in calib:
        model(row[None])
    return now() - start


def measure(
    args: argparse.Namespace, scheme: str, calib: Tensor, evaluation: list[Tensor], reference: torch.nn.Module
) -> dict[str, object]:
    """Quantize a fresh copy of the model, and return accuracy, size and time."""
    model = load_model(args.model, "float32")
    floor = forward_seconds(model, calib)
    config = LLMTemplate.get(model.config.model_type).get_config(scheme=scheme)
    start = time.perf_counter()
    ModelQuantizer(config).quantize_model(model, list(calib.split(1)))
    took = time.perf_counter() - start
    found = compare(model, reference, evaluation)
    with tempfile.TemporaryDirectory() as tmp:
        export_safetensors(model, f"{tmp}/out")
        size = sum(f.stat().st_size for f in Path(tmp, "out").glob("*.safetensors"))
    return {
        "scheme": scheme,
        "quantize_s": round(took, 2),
        "ratio": round(took / floor, 2),
        "megabytes": round(size / 1e6, 1),
        "perplexity": round(found.perplexity, 3),
        "mean_kl": round(found.mean_kl, 4),
        "p99_kl": round(found.p99_kl, 3),
        "top1": round(found.top1_agreement, 4),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--schemes", default=SCHEMES.replace(" ", ","))
    args = parser.parse_args(arguments)
    logging.getLogger("quark").setLevel(logging.ERROR)
    tokenizer = load_tokenizer(args.model)
    calib = sequences(tokenizer, args.text / "foldoc.txt", 200_000, 8, 512)
    rows = [
        sequences(tokenizer, args.text / "foldoc.txt", 3_500_000, 8, 512),
        sequences(tokenizer, args.text / "devil.txt", 20_000, 8, 512),
    ]
    evaluation = list(torch.cat(rows).split(4))
    reference = load_model(args.model, "float32")
    print(json.dumps({"scheme": "float", "perplexity": round(perplexity(reference, evaluation), 3)}), flush=True)
    for scheme in args.schemes.split(","):
        try:
            print(json.dumps(measure(args, scheme, calib, evaluation, reference)), flush=True)
        except ValueError as error:  # a scheme that does not fit the model's shapes is skipped
            print(json.dumps({"scheme": scheme, "refused": str(error).splitlines()[0][:200]}), flush=True)


if __name__ == "__main__":
    main()
