"""Perplexity of a model over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark.evaluate.logits import evaluating, in_chunks, log_probabilities, next_token_logits, windows_of
from quark.evaluate.statistics import Mean, mean_over
from quark.evaluate.windows import Windows

__all__ = ["Likelihood", "likelihood", "log_likelihood", "perplexity", "perplexity_of"]


@attrs.frozen
class Likelihood:
    """What a model says of a text.

    Attributes:
        perplexity: Per token, or per word where the windows say how many there are; with its standard error.
        bits_per_token: Mean negative log-likelihood of a token, in bits.
        tokens: The number of scored tokens.
    """

    perplexity: Mean
    bits_per_token: float
    tokens: int


def perplexity(model: nn.Module, token_batches: Iterable[Tensor | Windows]) -> float:
    """Return ``exp`` of the mean negative log-likelihood, in nats, of every scored token.

    Args:
        model: A model that returns logits ``[B, T, V]`` or an object with ``logits``. Its train/eval modes are restored afterwards.
        token_batches: Windows; or integer tensors ``[B, T]``, of which every token but the first of each sequence is scored. Sequences
            are independent.

    Raises:
        ConfigError: There is no batch, or one has a wrong shape.
        NonFiniteError: A logit is NaN or Inf.
    """
    return likelihood(model, token_batches).perplexity.value


def likelihood(model: nn.Module, token_batches: Iterable[Tensor | Windows]) -> Likelihood:
    """Return the perplexity of a model with its standard error; arguments and errors as for `perplexity`."""
    scores: list[Tensor] = []
    window: list[Tensor] = []
    words: int | None = None
    with evaluating(model):
        for windows in windows_of(token_batches):
            logits, targets, index = next_token_logits(model, windows)
            targets = targets.to(logits.device)
            scores += [log_likelihood(log_probabilities(part, "model"), t) for part, t in in_chunks(logits, targets)]
            window.append(index + (int(window[-1][-1]) + 1 if window else 0))
            words = windows.words
    if not scores:
        raise ConfigError("there are no tokens to evaluate: the batches are empty")
    nats = -torch.cat(scores)
    return Likelihood(perplexity_of(nats, torch.cat(window), words), float(nats.mean()) / math.log(2), len(nats))


def log_likelihood(log_p: Tensor, targets: Tensor) -> Tensor:
    """Return ``log_p[row, targets[row]]`` of each row, ``[N]``, float64, on the CPU. ``log_p`` ``[N, V]``, ``targets`` ``[N]``."""
    return log_p.gather(-1, targets[:, None])[:, 0].double().cpu()


def perplexity_of(nats: Tensor, window: Tensor, words: int | None = None) -> Mean:
    """Return the perplexity per token, or per word, for negative log-likelihoods ``[N]`` of tokens and the windows that they are in."""
    mean = mean_over(nats, window)
    if words is None:
        return mean.exp()
    share = len(nats) / max(1, words)
    return Mean(mean.value * share, None if mean.error is None else mean.error * share).exp()
