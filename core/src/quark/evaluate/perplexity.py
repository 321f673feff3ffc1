"""Perplexity of a model over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from quark.errors import ConfigError
from quark.evaluate.logits import checked_batch, evaluating, in_chunks, log_probabilities, next_token_logits

__all__ = ["negative_log_likelihood", "perplexity", "perplexity_of"]


def perplexity(model: nn.Module, token_batches: Iterable[Tensor]) -> float:
    """Return ``exp`` of the mean negative log-likelihood, in nats, of every token but the first of each sequence.

    Args:
        model: A model that returns logits ``[B, T, V]`` or an object with ``logits``. Its train/eval modes are restored afterwards.
        token_batches: Integer tensors ``[B, T]``; sequences are independent.

    Raises:
        ConfigError: There is no batch, or one has a wrong shape.
        NonFiniteError: A logit is NaN or Inf.
    """
    total, count = 0.0, 0
    with evaluating(model):
        for batch in token_batches:
            logits = next_token_logits(model, checked_batch(batch))
            targets = batch[:, 1:].flatten().to(logits.device)
            total += sum(negative_log_likelihood(log_probabilities(part, "model"), t) for part, t in in_chunks(logits, targets))
            count += targets.numel()
    return perplexity_of(total, count)


def negative_log_likelihood(log_p: Tensor, targets: Tensor) -> float:
    """Return the sum over rows of ``−log_p[row, targets[row]]``, in nats, summed in float64. ``log_p`` ``[N, V]``, ``targets`` ``[N]``."""
    return -float(log_p.gather(-1, targets[:, None]).double().sum())


def perplexity_of(total: float, count: int) -> float:
    """Return ``exp(total / count)``; infinity where that overflows a float.

    Raises:
        ConfigError: ``count`` is 0.
    """
    if count == 0:
        raise ConfigError("there are no tokens to evaluate: the batches are empty")
    try:
        return math.exp(total / count)
    except OverflowError:
        return math.inf
