"""What every program measures of a model, whichever environment it runs in: the time of a forward, and perplexity."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


def measured(version: str, path: str, tokens: str, quantize: Callable[[nn.Module, Tensor], nn.Module]) -> None:
    """Load a model, quantize it, and print a line of JSON: the version, seconds of both, of a forward, and the perplexity.

    Args:
        version: Of the program.
        path: Directory of the float checkpoint.
        tokens: File with the tensors ``calibration`` and ``evaluation``, ``[sequences, length]``.
        quantize: Returns the quantized model for a model and the calibration tokens.
    """
    rows = load_file(tokens)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    forward = forward_seconds(model, rows["calibration"])
    start = time.perf_counter()
    model = quantize(model, rows["calibration"])
    seconds = time.perf_counter() - start
    found = {"version": version, "seconds": seconds, "forward": forward, "perplexity": perplexity(model, rows["evaluation"])}
    print(json.dumps(found))


@torch.no_grad()
def forward_seconds(model: nn.Module, rows: Tensor) -> float:
    """Return the wall time of a forward over all rows, one at a time."""
    model(rows[:1])
    start = time.perf_counter()
    for row in rows:
        model(row[None])
    return time.perf_counter() - start


@torch.no_grad()
def perplexity(model: nn.Module, rows: Tensor) -> float:
    """Return the perplexity of next tokens over the rows."""
    total = 0.0
    for row in rows:
        logits = model(row[None]).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    return math.exp(total / rows[:, 1:].numel())
