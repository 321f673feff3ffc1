"""Measure time, memory, perplexity and divergence of a quantization, in the same way for every program."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


def measured(version: str, path: str, tokens: str, quantize: Callable[[nn.Module, Tensor], nn.Module]) -> None:
    """Load a model, quantize it, and print a line of JSON: version, time, memory and `accuracy`.

    ``seconds`` and ``cpu`` are wall and CPU time of quantization. ``forward`` and ``forward_cpu`` are wall
    and CPU time of a forward pass of the float model over the calibration tokens. ``peak`` is the peak
    resident memory of quantization minus the resident memory after loading the model, in bytes.

    Args:
        version: Version of the program.
        path: Directory of the float checkpoint.
        tokens: Directory that `benchmarks.peers` has written. ``tokens.safetensors`` has ``calibration`` and
            ``evaluation``, ``[sequences, length]``; ``reference-N.safetensors`` has the float model's
            `log_probabilities` for row N of ``evaluation``.
        quantize: Function from a model and the calibration tokens to the quantized model.
    """
    calibration = load_file(f"{tokens}/tokens.safetensors")["calibration"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    seconds, cpu = forward_seconds(model, calibration)
    result: dict[str, str | float] = {"version": version, "forward": seconds, "forward_cpu": cpu}
    before = resident()
    wall, cpu = time.perf_counter(), time.process_time()
    model = quantize(model, calibration)
    result |= {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "peak": peak() - before}
    result |= accuracy(model, tokens)
    print(json.dumps(result))


@torch.no_grad()
def forward_seconds(model: nn.Module, rows: Tensor) -> tuple[float, float]:
    """Return wall and CPU time of forward passes over all rows; each pass has one row."""
    model(rows[:1])
    wall, cpu = time.perf_counter(), time.process_time()
    for row in rows:
        model(row[None])
    return time.perf_counter() - wall, time.process_time() - cpu


def resident() -> int:
    """Return the resident memory in bytes, and reset `peak` to it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak()


def peak() -> int:
    """Return the peak of the resident memory since the last call of `resident`, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@torch.no_grad()
def log_probabilities(model: nn.Module, row: Tensor) -> Tensor:
    """Return the predictions for a sequence, as log-probabilities ``[length - 1, vocabulary]``."""
    logits: Tensor = model(row[None, :-1]).logits[0]
    return logits.float().log_softmax(-1)


@torch.no_grad()
def accuracy(model: nn.Module, tokens: str) -> dict[str, float]:
    """Return ``perplexity``, ``float_perplexity``, ``mean_kl`` (in nats), and ``top1`` agreement (0 to 1).

    `quark_workbench.evaluate.compare` gives the same figures, but it is not installed in the environments of
    other programs.

    Args:
        model: The quantized model.
        tokens: Directory of the tokens, as in `measured`.
    """
    nats = float_nats = kl = agreeing = 0.0
    rows = load_file(f"{tokens}/tokens.safetensors")["evaluation"]
    for index, row in enumerate(rows):
        log_q, log_p = log_probabilities(model, row), load_file(f"{tokens}/reference-{index}.safetensors")["log_probabilities"]
        nats -= float(log_q.gather(1, row[1:, None]).sum(dtype=torch.float64))
        float_nats -= float(log_p.gather(1, row[1:, None]).sum(dtype=torch.float64))
        kl += float(log_p.exp().mul_(log_p - log_q).sum(dtype=torch.float64))
        agreeing += float((log_q.argmax(-1) == log_p.argmax(-1)).sum())
    count = rows[:, 1:].numel()
    perplexities = {"perplexity": math.exp(nats / count), "float_perplexity": math.exp(float_nats / count)}
    return perplexities | {"mean_kl": kl / count, "top1": agreeing / count}
