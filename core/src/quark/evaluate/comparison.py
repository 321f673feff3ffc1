"""Comparison of a model with its reference: KL divergence of the next-token distributions, and both perplexities, in one pass."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark.evaluate.logits import checked_batch, evaluating, in_chunks, log_probabilities, next_token_logits
from quark.evaluate.perplexity import negative_log_likelihood, perplexity_of

__all__ = ["Comparison", "compare", "kl_divergence"]


@attrs.frozen
class Comparison:
    """Metrics of a model and its reference over the same tokens.

    Attributes:
        mean_kl: Mean over tokens of KL(reference ‖ model), in nats; 0 for equal distributions.
        p99_kl: 99th percentile over tokens of KL(reference ‖ model), in nats.
        top1_agreement: Share of tokens for which both models predict the same most likely next token, 0 to 1.
        perplexity: Perplexity of the model.
        reference_perplexity: Perplexity of the reference.
        tokens: The number of compared predictions.
    """

    mean_kl: float
    p99_kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float
    tokens: int


def compare(model: nn.Module, reference: nn.Module, token_batches: Iterable[Tensor]) -> Comparison:
    """Return a comparison of next-token predictions, made batch by batch; one number per token is kept in memory.

    Args:
        model: As for `quark.evaluate.perplexity`.
        reference: A model of the same vocabulary, which may be on another device.
        token_batches: Integer tensors ``[B, T]``.

    Raises:
        ConfigError: There is no batch, or one has a wrong shape, or the vocabularies differ.
        NonFiniteError: A logit is NaN or Inf.
    """
    divergences: list[Tensor] = []
    total, reference_total, agreed = 0.0, 0.0, 0
    with evaluating(model, reference):
        for batch in token_batches:
            logits = next_token_logits(model, checked_batch(batch))
            expected = next_token_logits(reference, batch).to(logits.device)
            if expected.shape != logits.shape:
                raise ConfigError(
                    f"the model predicts {logits.shape[-1]} tokens and the reference {expected.shape[-1]}: compare models of one vocabulary"
                )
            targets = batch[:, 1:].flatten().to(logits.device)
            for q, p, t in in_chunks(logits, expected, targets):
                log_q, log_p = log_probabilities(q, "model"), log_probabilities(p, "reference")
                divergences.append(kl_divergence(log_p, log_q).cpu())
                agreed += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())
                total += negative_log_likelihood(log_q, t)
                reference_total += negative_log_likelihood(log_p, t)
    kl = torch.cat(divergences) if divergences else torch.empty(0)
    count = kl.numel()
    own, others = perplexity_of(total, count), perplexity_of(reference_total, count)
    return Comparison(float(kl.mean()), _percentile(kl, 99), agreed / count, own, others, count)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) of each row, in nats, float64, at least 0, for log-probabilities ``[N, V]``; a token with p = 0 adds 0."""
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    # Rounding errors can make the sum slightly negative, which no divergence is.
    return terms.sum(-1, dtype=torch.float64).clamp_(min=0)


def _percentile(values: Tensor, percent: int) -> float:
    """Return the smallest value that at least ``percent`` % of the values do not exceed; `torch.quantile` limits their number."""
    return float(values.kthvalue(max(1, -(-values.numel() * percent // 100))).values)
