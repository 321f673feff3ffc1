"""Comparison of vLLM's outputs with our own simulation of a checkpoint.

vLLM continues some texts, and gives its log-probabilities of every token at every position. They are compared
with those of our simulation over the same tokens (teacher forcing), in which what vLLM's CPU kernels are
known to do otherwise is built in (`vllm_on_cpu`). Kernels and simulation round at the same places in other
orders, and quantized activations amplify such differences: at the edge of a step, the last bit of a bfloat16
decides which code is taken. How much is measured on the simulation alone, in bfloat16 and in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quark
from quark.config.layer import levels

from .client_process import ClientProcess
from .vllm_on_cpu import Texts, generate, simulated

__all__ = ["FARTHER", "dtype_for", "is_computed_by_vllm"]

FARTHER = 2.0
"""How much farther from the simulation in float32 vLLM may be than the simulation in bfloat16, in Kullback-Leibler divergence.

1 is expected, since both round as often and as coarsely; the mean is over about 95 positions. Seen are 0.06 (in float16) to 1. Against a
simulation that rounds the cache to nearest, which vLLM's CPU kernel does not, the ratio is 2.3 (ptpc_fp8) to 13 (int4_wo_128)."""
SURE = 4 * 2**0.5
"""Choices are compared where the best token leads by that many times the root mean square of the differences between the simulation in
bfloat16 and in float32: a difference of two log-probabilities has √2 times their error, and four times that is beyond 95 positions.
Quantized inputs give errors with longer tails: with rotations that run, the two simulations themselves choose two tokens at one of 248
positions where the lead is 6.0 times the root mean square. What they do not agree on is not compared."""

CHOSEN_IN_ANY_SCHEME = 0.1
"""Share of positions at which the best token has to lead so far, in schemes that vLLM has no kernel for: inputs of 4 bits change their
codes so often that the smallest share seen is 0.11 (int4_wa_64)."""


def dtype_for(scheme: str) -> torch.dtype:
    """Return the dtype in which vLLM runs a scheme: in bfloat16 its 4-bit kernel for CPUs with AMX would round the activations too."""
    config = quark.schemes().load_config(scheme)()
    is_four_bit = config.input_tensors is None and levels(config.weight)[-1].dtype.name in ("int4", "uint4")
    return torch.float16 if is_four_bit else torch.bfloat16


def is_computed_by_vllm(
    vllm: ClientProcess, directory: Path, cache: str, dtype: torch.dtype, *, own_layers: bool = False, **options: Any
) -> Texts:
    """Compare vLLM with the simulation of an export, over texts that vLLM continues; return these texts.

    Args:
        vllm: The process.
        directory: The export.
        cache: vLLM's ``kv_cache_dtype``.
        dtype: Of vLLM's activations.
        own_layers: Whether vLLM computes the layers by quark's own, of whichever scheme.
        **options: More arguments of vLLM's ``LLM``.
    """
    texts = generate(vllm, directory, cache, dtype, **options)
    of_vllm: Any = {"cache": cache, "own_layers": own_layers} if own_layers else {}
    exact, coarse = (simulated(directory, texts, precision, dtype, **of_vllm) for precision in (torch.float32, torch.bfloat16))
    distance, of_bfloat16 = divergence(texts.logprobs, exact), divergence(coarse, exact)
    assert distance <= FARTHER * of_bfloat16
    best, second = exact.topk(2, dim=-1).values.T
    sure = (best - second > SURE * (coarse - exact).square().mean().sqrt()) & (coarse.argmax(-1) == exact.argmax(-1))
    assert sure.sum() > len(sure) * (CHOSEN_IN_ANY_SCHEME if own_layers else 1 / 4)
    assert torch.equal(texts.logprobs.argmax(-1)[sure], exact.argmax(-1)[sure])
    return texts


def divergence(logprobs: Tensor, reference: Tensor) -> float:
    """Return the Kullback-Leibler divergence of log-probabilities from others, in nats, mean over positions."""
    return float((logprobs.exp() * (logprobs - reference)).sum(-1).mean())
