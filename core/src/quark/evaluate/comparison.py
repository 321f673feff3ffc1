"""Comparison of a model with its reference over the same tokens: divergence of the next-token distributions, and both perplexities."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark.evaluate.logits import evaluating, in_chunks, log_probabilities, next_token_logits, windows_of
from quark.evaluate.perplexity import log_likelihood, perplexity_of
from quark.evaluate.statistics import mean_over, percentile
from quark.evaluate.windows import Windows

__all__ = ["Comparison", "compare", "kl_divergence"]


@attrs.frozen(kw_only=True)
class Comparison:
    """Metrics of a model and its reference over the same tokens. KL is KL(reference ‖ model) of a prediction, in nats; 0 for equal ones.

    An attribute that ends in ``_error`` is the standard error of the one before it, with windows taken for independent of each other; None
    where there is only one window. Source: the statistics that ``llama-perplexity --kl-divergence`` prints.

    Attributes:
        mean_kl: Mean over tokens.
        median_kl: Median over tokens.
        p90_kl: 90th percentile over tokens.
        p99_kl: 99th percentile.
        p999_kl: 99.9th percentile.
        max_kl: Largest.
        top1_agreement: Share of tokens for which both models predict the same most likely next token, 0 to 1.
        probability_shift: Mean over tokens of the probability of the right token by the model, minus that by the reference, −1 to 1.
        probability_shift_rms: Root of the mean square of that difference.
        perplexity: Perplexity of the model.
        reference_perplexity: Perplexity of the reference.
        perplexity_ratio: Quotient of the two; its error is that of paired differences, far below those of the two.
        tokens: The number of compared predictions.
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


@attrs.define(eq=False)
class _Predictions:
    """One number for each token so far, by column; rows are tokens."""

    kl: list[Tensor] = attrs.field(factory=list)
    agrees: list[Tensor] = attrs.field(factory=list)
    log_q: list[Tensor] = attrs.field(factory=list)
    log_p: list[Tensor] = attrs.field(factory=list)
    window: list[Tensor] = attrs.field(factory=list)
    words: int | None = None

    def comparison(self) -> Comparison:
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
        )


def compare(model: nn.Module, reference: nn.Module, token_batches: Iterable[Tensor | Windows]) -> Comparison:
    """Return a comparison of next-token predictions, made batch by batch; a few numbers per token are kept in memory.

    Args:
        model: As for `quark.evaluate.perplexity`.
        reference: A model of the same vocabulary, which may be on another device.
        token_batches: As for `quark.evaluate.perplexity`.

    Raises:
        ConfigError: There is no batch, or one has a wrong shape, or the vocabularies differ.
        NonFiniteError: A logit is NaN or Inf.
    """
    seen = _Predictions()
    with evaluating(model, reference):
        for windows in windows_of(token_batches):
            logits, targets, index = next_token_logits(model, windows)
            expected = next_token_logits(reference, windows)[0].to(logits.device)
            if expected.shape != logits.shape:
                raise ConfigError(
                    f"the model predicts {logits.shape[-1]} tokens and the reference {expected.shape[-1]}: compare models of one vocabulary"
                )
            for q, p, t in in_chunks(logits, expected, targets.to(logits.device)):
                _add(seen, log_probabilities(q, "model"), log_probabilities(p, "reference"), t)
            seen.window.append(index + (int(seen.window[-1][-1]) + 1 if seen.window else 0))
            seen.words = windows.words
    if not seen.kl:
        raise ConfigError("there are no tokens to evaluate: the batches are empty")
    return seen.comparison()


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) of each row, in nats, float64, at least 0, for log-probabilities ``[N, V]``; a token with p = 0 adds 0."""
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    # Rounding errors can make the sum slightly negative, which no divergence is.
    return terms.sum(-1, dtype=torch.float64).clamp_(min=0)


def _add(seen: _Predictions, log_q: Tensor, log_p: Tensor, targets: Tensor) -> None:
    """Add the tokens of one chunk: log-probabilities ``[N, V]`` by model and reference, targets ``[N]``."""
    seen.kl.append(kl_divergence(log_p, log_q).cpu())
    seen.agrees.append((log_q.argmax(-1) == log_p.argmax(-1)).double().cpu())
    seen.log_q.append(log_likelihood(log_q, targets))
    seen.log_p.append(log_likelihood(log_p, targets))
