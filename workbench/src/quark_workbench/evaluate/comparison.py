"""Comparison of a model with its reference over the same tokens: divergence and perplexities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark.plugins.run_events import running
from quark_workbench.evaluate.logits import evaluating, in_chunks, log_probabilities, next_token_logits, windows_of
from quark_workbench.evaluate.metrics import Mean, TokenMetrics, mean_over, percentile
from quark_workbench.evaluate.perplexity import log_likelihood, perplexity_of
from quark_workbench.evaluate.windows import Windows

__all__ = ["Comparison", "Predictions", "compare", "kl_divergence"]


@attrs.frozen(kw_only=True)
class Comparison:
    """Metrics of a model and its reference over the same tokens.

    KL is KL(reference ‖ model) of a prediction, in nats; 0 for equal ones.

    An attribute that ends in ``_error`` is the standard error of the one before it, with windows taken for
    independent of each other; None where there is only one window. Source: the statistics that
    ``llama-perplexity --kl-divergence`` prints.

    Attributes:
        mean_kl: Mean over tokens.
        median_kl: Median over tokens.
        p90_kl: 90th percentile over tokens.
        p99_kl: 99th percentile.
        p999_kl: 99.9th percentile.
        max_kl: Largest.
        top1_agreement: Share of tokens for which both models predict the same most likely next token, 0 to 1.
        probability_shift: Mean over tokens of the probability of the right token by the model, minus that by
            the reference, −1 to 1.
        probability_shift_rms: Root of the mean square of that difference.
        perplexity: Perplexity of the model.
        reference_perplexity: Perplexity of the reference.
        perplexity_ratio: Quotient of the two; its error is that of paired differences, far below those of the
            two.
        tokens: The number of compared predictions.
        metrics: Means of registered metrics, by name.
    """

    mean_kl: float
    mean_kl_error: float | None
    median_kl: float
    p90_kl: float
    p99_kl: float
    p999_kl: float
    max_kl: float
    top1_agreement: float
    top1_agreement_error: float | None
    probability_shift: float
    probability_shift_error: float | None
    probability_shift_rms: float
    perplexity: float
    perplexity_error: float | None
    reference_perplexity: float
    reference_perplexity_error: float | None
    perplexity_ratio: float
    perplexity_ratio_error: float | None
    tokens: int
    metrics: Mapping[str, Mean] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Predictions:
    """One number for each compared prediction so far, by column; rows are tokens.

    Attributes:
        metrics: The registered metrics.
    """

    metrics: TokenMetrics = attrs.field(factory=TokenMetrics)
    kl: list[Tensor] = attrs.field(factory=list)
    agrees: list[Tensor] = attrs.field(factory=list)
    log_q: list[Tensor] = attrs.field(factory=list)
    log_p: list[Tensor] = attrs.field(factory=list)
    window: list[Tensor] = attrs.field(factory=list)
    words: int | None = None

    def add(self, logits: Tensor, expected: Tensor, targets: Tensor, index: Tensor, words: int | None) -> None:
        """Add the tokens of one batch.

        Arguments: logits of model and reference ``[N, V]``, right tokens, their windows, words of the text.

        Raises:
            ConfigError: The vocabularies differ.
            NonFiniteError: A logit is NaN or Inf.
        """
        if expected.shape != logits.shape:
            raise ConfigError(
                f"the model predicts {logits.shape[-1]} tokens and the reference {expected.shape[-1]}: compare models of one vocabulary"
            )
        for q, p, t in in_chunks(logits, expected.to(logits.device), targets.to(logits.device)):
            log_q, log_p = log_probabilities(q, "model"), log_probabilities(p, "reference")
            self.metrics.add(log_q, t, log_p)
            self.kl.append(kl_divergence(log_p, log_q).cpu())
            self.agrees.append((log_q.argmax(-1) == log_p.argmax(-1)).double().cpu())
            self.log_q.append(log_likelihood(log_q, t))
            self.log_p.append(log_likelihood(log_p, t))
        self.window.append(index + (int(self.window[-1][-1]) + 1 if self.window else 0))
        self.words = words

    def comparison(self) -> Comparison:
        """Return the metrics of all tokens.

        Raises:
            ConfigError: There are none.
        """
        if not self.kl:
            raise ConfigError("there are no tokens to evaluate: the batches are empty")
        kl, agrees, log_q, log_p, window = (torch.cat(part) for part in (self.kl, self.agrees, self.log_q, self.log_p, self.window))
        shift = log_q.exp() - log_p.exp()
        mean_kl, top1, mean_shift = (mean_over(values, window) for values in (kl, agrees, shift))
        own, other, ratio = (perplexity_of(nats, window, self.words) for nats in (-log_q, -log_p, log_p - log_q))
        return Comparison(
            mean_kl=mean_kl.value,
            mean_kl_error=mean_kl.error,
            median_kl=percentile(kl, 50),
            p90_kl=percentile(kl, 90),
            p99_kl=percentile(kl, 99),
            p999_kl=percentile(kl, 99.9),
            max_kl=float(kl.max()),
            top1_agreement=top1.value,
            top1_agreement_error=top1.error,
            probability_shift=mean_shift.value,
            probability_shift_error=mean_shift.error,
            probability_shift_rms=float(shift.square().mean().sqrt()),
            perplexity=own.value,
            perplexity_error=own.error,
            reference_perplexity=other.value,
            reference_perplexity_error=other.error,
            perplexity_ratio=ratio.value,
            perplexity_ratio_error=ratio.error,
            tokens=len(kl),
            metrics=self.metrics.means(window),
        )


def compare(model: nn.Module, reference: nn.Module, token_batches: Iterable[Tensor | Windows], metrics: Sequence[str] = ()) -> Comparison:
    """Return a comparison of next-token predictions, batch by batch; a few numbers per token are in memory.

    Args:
        model: As for `quark_workbench.evaluate.perplexity`.
        reference: A model of the same vocabulary, which may be on another device.
        token_batches: As for `quark_workbench.evaluate.perplexity`.
        metrics: Names of `quark.metrics` to measure too.

    Raises:
        ConfigError: There is no batch, or one has a wrong shape, or the vocabularies differ.
        UnknownNameError: (a ValueError) There is no such metric.
        NonFiniteError: A logit is NaN or Inf.
    """
    predictions = Predictions(TokenMetrics.of(metrics, has_reference=True))
    with running("evaluate", source=type(model).__name__) as events, evaluating(model, reference):
        events.phase("evaluate")
        for windows in events.batches(windows_of(token_batches), of=token_batches):
            logits, targets, index = next_token_logits(model, windows)
            predictions.add(logits, next_token_logits(reference, windows)[0], targets, index, windows.words)
    return predictions.comparison()


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) of each row, in nats, float64, for log-probabilities ``[N, V]``.

    It is at least 0; a token with p = 0 adds 0.
    """
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    # Rounding errors can make the sum slightly negative, which no divergence is.
    return terms.sum(-1, dtype=torch.float64).clamp_(min=0)
