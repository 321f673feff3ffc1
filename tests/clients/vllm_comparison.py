"""Compare vLLM's outputs with our own simulation of a checkpoint.

vLLM continues some texts, and returns its log-probabilities of every token at every position. The test
compares these with our simulation's log-probabilities over the same tokens (teacher forcing). The simulation
copies the known deviations of vLLM's CPU kernels (`vllm_on_cpu`). Kernels and simulation round at the same
places, but sum in different orders. Quantized activations amplify such differences: at the edge of a step,
the last bit of a bfloat16 decides the code. The simulation alone, in bfloat16 and in float32, shows how large
such differences are.
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
"""Largest KL divergence of vLLM from the float32 simulation ÷ that of the bfloat16 simulation.

The expected ratio is 1, since both round as often and as coarsely. The mean is over about 95 positions. Measured ratios are 0.06 (in
float16) to 1. If the simulation rounded the cache to nearest, which vLLM's CPU kernel does not, the ratio would be 2.3 (ptpc_fp8) to 13
(int4_wo_128)."""
SURE = 4 * 2**0.5
"""Least lead of the best token for a comparison, in multiples of the RMS difference between the bfloat16 and the float32 simulation.

The difference of two log-probabilities has √2 times their error. Four times this error is not exceeded at 95 positions. Quantized inputs
give errors with longer tails: with online rotations, the two simulations choose different tokens at one of 248 positions, although the
lead is 6.0 times the RMS difference. Positions at which the two simulations disagree are not compared."""

CHOSEN_IN_ANY_SCHEME = 0.1
"""Least share of positions at which the best token leads that far, for schemes without a kernel in vLLM.

Inputs of 4 bits change their codes so often that the smallest measured share is 0.11 (int4_wa_64)."""


def dtype_for(scheme: str) -> torch.dtype:
    """Return the dtype in which vLLM runs a scheme. In bfloat16, its 4-bit kernel for CPUs with AMX would round the activations too."""
    config = quark.schemes().load_config(scheme)()
    is_four_bit = config.input_tensors is None and levels(config.weight)[-1].dtype.name in ("int4", "uint4")
    return torch.float16 if is_four_bit else torch.bfloat16


def is_computed_by_vllm(
    vllm: ClientProcess, directory: Path, cache: str, dtype: torch.dtype, *, own_layers: bool = False, **options: Any
) -> Texts:
    """Compare vLLM with the simulation of an export, over texts that vLLM continues; return these texts.

    Args:
        vllm: The vLLM process.
        directory: The export.
        cache: vLLM's ``kv_cache_dtype``.
        dtype: Dtype of vLLM's activations.
        own_layers: Whether vLLM uses quark's layers rather than its own kernels, for every scheme.
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
    """Return the mean KL divergence of log-probabilities from others over positions, in nats."""
    return float((logprobs.exp() * (logprobs - reference)).sum(-1).mean())
