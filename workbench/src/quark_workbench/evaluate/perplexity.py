"""Perplexity of a model over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
from torch import Tensor, nn

from quark_workbench.evaluate.metrics import Mean, mean_over
from quark_workbench.evaluate.predictions import Predictions, predictions_of
from quark_workbench.evaluate.windows import Windows

__all__ = ["Likelihood", "likelihood", "likelihood_of", "perplexity", "perplexity_of"]


@attrs.frozen
class Likelihood:
    """The likelihood of a text by a model.

    Attributes:
        perplexity: Perplexity per token, or per word if the windows have the number of words, with its
            standard error.
        bits_per_token: Mean negative log-likelihood of a token, in bits.
        tokens: The number of scored tokens.
        metrics: Means of registered metrics, by name.
    """

    perplexity: Mean
    bits_per_token: float
    tokens: int
    metrics: Mapping[str, Mean] = attrs.field(factory=dict)


def perplexity(model: nn.Module, token_batches: Iterable[Tensor | Windows]) -> float:
    """Return ``exp`` of the mean negative log-likelihood, in nats, of every scored token.

    Args:
        model: A model that returns logits ``[B, T, V]`` or an object with ``logits``. Its train/eval modes
            are restored afterwards.
        token_batches: Windows, or integer tensors ``[B, T]``: every token but the first of each sequence is
            scored. Sequences are independent.

    Raises:
        ConfigError: There is no batch, or a batch has a wrong shape.
        NonFiniteError: A logit is NaN or Inf.
    """
    return likelihood(model, token_batches).perplexity.value


def likelihood(model: nn.Module, token_batches: Iterable[Tensor | Windows], metrics: Sequence[str] = ()) -> Likelihood:
    """Return the perplexity of a model with its standard error, and the means of metrics of `quark.metrics`.

    Other arguments and errors are as in `perplexity`; an unknown metric raises UnknownNameError.
    """
    return likelihood_of(predictions_of([model], token_batches, metrics))


def likelihood_of(predictions: Predictions) -> Likelihood:
    """Return the `Likelihood` of a text.

    Raises:
        ConfigError: There are no predictions.
    """
    nats, window = -predictions.column("log_q"), predictions.column("window")
    bits = float(nats.mean()) / math.log(2)
    return Likelihood(perplexity_of(nats, window, predictions.words), bits, len(nats), predictions.metrics.means(window))


def perplexity_of(nats: Tensor, window: Tensor, words: int | None = None) -> Mean:
    """Return the perplexity per token or word from negative log-likelihoods ``[N]`` and windows."""
    mean = mean_over(nats, window)
    if words is None:
        return mean.exp()
    share = len(nats) / max(1, words)
    return Mean(mean.value * share, None if mean.error is None else mean.error * share).exp()
