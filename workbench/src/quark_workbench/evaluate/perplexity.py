"""The perplexity of a model on a text."""

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
    """The likelihood of a text under a model.

    Attributes:
        perplexity: Perplexity with its standard error. It is per word if the windows have the number of
            words, or else per token.
        bits_per_token: Mean negative log-likelihood of a token, in bits.
        tokens: The number of scored tokens.
        metrics: Dictionary from the name of a registered metric to its mean.
    """

    perplexity: Mean
    bits_per_token: float
    tokens: int
    metrics: Mapping[str, Mean] = attrs.field(factory=dict)


def perplexity(model: nn.Module, token_batches: Iterable[Tensor | Windows]) -> float:
    """Return the perplexity: ``exp`` of the mean negative log-likelihood of the scored tokens, in nats.

    Args:
        model: A model that returns logits ``[B, T, V]`` or an object with ``logits``. Its train/eval modes
            are restored afterwards.
        token_batches: `Windows` objects, or integer tensors ``[B, T]``. In each row of such a tensor, every
            token but the first is scored. Rows are independent sequences.

    Raises:
        ConfigError: There is no batch, or a batch has a wrong shape.
        NonFiniteError: A logit is NaN or Inf.
    """
    return likelihood(model, token_batches).perplexity.value


def likelihood(model: nn.Module, token_batches: Iterable[Tensor | Windows], metrics: Sequence[str] = ()) -> Likelihood:
    """Return the perplexity of a model with its standard error, and the means of further metrics.

    ``metrics`` are names from `quark.metrics`; an unknown name raises UnknownNameError. Other arguments and
    errors are as in `perplexity`.
    """
    return likelihood_of(predictions_of([model], token_batches, metrics))


def likelihood_of(predictions: Predictions) -> Likelihood:
    """Return the `Likelihood` of a text, from the predictions of its tokens.

    Raises:
        ConfigError: There are no predictions.
    """
    nats, window = -predictions.column("log_q"), predictions.column("window")
    bits = float(nats.mean()) / math.log(2)
    return Likelihood(perplexity_of(nats, window, predictions.words), bits, len(nats), predictions.metrics.means(window))


def perplexity_of(nats: Tensor, window: Tensor, words: int | None = None) -> Mean:
    """Return the perplexity with its standard error. It is per word if ``words`` is given, or else per token.

    ``nats [N]`` has the negative log-likelihoods of N tokens. ``window [N]`` has the number of each token's
    window.
    """
    mean = mean_over(nats, window)
    if words is None:
        return mean.exp()
    share = len(nats) / max(1, words)
    return Mean(mean.value * share, None if mean.error is None else mean.error * share).exp()
