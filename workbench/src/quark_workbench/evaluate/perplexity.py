"""Perplexity of a model over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark.plugins.run_events import running
from quark_workbench.evaluate.logits import evaluating, in_chunks, log_probabilities, next_token_logits, windows_of
from quark_workbench.evaluate.metrics import Mean, TokenMetrics, mean_over
from quark_workbench.evaluate.windows import Windows

__all__ = ["Likelihood", "Scores", "likelihood", "log_likelihood", "perplexity", "perplexity_of"]


@attrs.frozen
class Likelihood:
    """What a model says of a text.

    Attributes:
        perplexity: Per token, or per word where the windows say how many there are; with its standard error.
        bits_per_token: Mean negative log-likelihood of a token, in bits.
        tokens: The number of scored tokens.
        metrics: Means of registered metrics, by name.
    """

    perplexity: Mean
    bits_per_token: float
    tokens: int
    metrics: Mapping[str, Mean] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Scores:
    """The negative log-likelihoods of a model's tokens so far, and the values of registered metrics.

    Attributes:
        metrics: The metrics.
    """

    metrics: TokenMetrics = attrs.field(factory=TokenMetrics)
    _nats: list[Tensor] = attrs.field(factory=list, init=False)
    _window: list[Tensor] = attrs.field(factory=list, init=False)
    _words: int | None = attrs.field(default=None, init=False)

    def add(self, logits: Tensor, targets: Tensor, index: Tensor, words: int | None) -> None:
        """Add the tokens of one batch, as from `next_token_logits`, and the number of words of the text."""
        for part, chosen in in_chunks(logits, targets.to(logits.device)):
            log_q = log_probabilities(part, "model")
            self.metrics.add(log_q, chosen)
            self._nats.append(-log_likelihood(log_q, chosen))
        self._window.append(index + (int(self._window[-1][-1]) + 1 if self._window else 0))
        self._words = words

    def likelihood(self) -> Likelihood:
        """Return what the model says of all tokens.

        Raises:
            ConfigError: There are none.
        """
        if not self._nats:
            raise ConfigError("there are no tokens to evaluate: the batches are empty")
        nats, window = torch.cat(self._nats), torch.cat(self._window)
        bits = float(nats.mean()) / math.log(2)
        return Likelihood(perplexity_of(nats, window, self._words), bits, len(nats), self.metrics.means(window))


def perplexity(model: nn.Module, token_batches: Iterable[Tensor | Windows]) -> float:
    """Return ``exp`` of the mean negative log-likelihood, in nats, of every scored token.

    Args:
        model: A model that returns logits ``[B, T, V]`` or an object with ``logits``. Its train/eval modes
            are restored afterwards.
        token_batches: Windows; or integer tensors ``[B, T]``, of which every token but the first of each
            sequence is scored. Sequences are independent.

    Raises:
        ConfigError: There is no batch, or one has a wrong shape.
        NonFiniteError: A logit is NaN or Inf.
    """
    return likelihood(model, token_batches).perplexity.value


def likelihood(model: nn.Module, token_batches: Iterable[Tensor | Windows], metrics: Sequence[str] = ()) -> Likelihood:
    """Return the perplexity of a model with its standard error, and the means of metrics of `quark.metrics`.

    The other arguments and the errors are those of `perplexity`; an unknown metric is an UnknownNameError.
    """
    scores = Scores(TokenMetrics.of(metrics, has_reference=False))
    with running("evaluate", source=type(model).__name__) as events, evaluating(model):
        events.phase("evaluate")
        for windows in events.batches(windows_of(token_batches), of=token_batches):
            scores.add(*next_token_logits(model, windows), windows.words)
    return scores.likelihood()


def log_likelihood(log_p: Tensor, targets: Tensor) -> Tensor:
    """Return ``log_p[row, targets[row]]`` of each row, ``[N]``, float64, on the CPU.

    ``log_p`` ``[N, V]``, ``targets`` ``[N]``.
    """
    return log_p.gather(-1, targets[:, None])[:, 0].double().cpu()


def perplexity_of(nats: Tensor, window: Tensor, words: int | None = None) -> Mean:
    """Return the perplexity per token or word, for negative log-likelihoods ``[N]`` and windows."""
    mean = mean_over(nats, window)
    if words is None:
        return mean.exp()
    share = len(nats) / max(1, words)
    return Mean(mean.value * share, None if mean.error is None else mean.error * share).exp()
