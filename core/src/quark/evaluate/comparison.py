"""How far a model is from its reference: divergence of the next-token distributions, and both perplexities, in one pass."""

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
    """A model beside its reference, over the same tokens.

    Attributes:
        mean_kl: Mean over tokens of KL(reference ‖ model), in nats; 0 where they agree.
        p99_kl: The 99th percentile of the same: what the worst hundredth exceeds.
        top1_agreement: Share of tokens for which both hold the same next token likeliest, 0 to 1.
        perplexity: Of the model.
        reference_perplexity: Of the reference.
        tokens: How many predictions were compared.
    """

    mean_kl: float
    p99_kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float
    tokens: int


def compare(model: nn.Module, reference: nn.Module, token_batches: Iterable[Tensor]) -> Comparison:
    """Compare next-token predictions batch by batch; what is kept of a batch is one number per token.

    Args:
        model: As for `quark.evaluate.perplexity`.
        reference: Likewise, with the same vocabulary; may be on another device.
        token_batches: Whole numbers ``[B, T]``.

    Raises:
        ConfigError: There is no batch, or one has a wrong shape, or the vocabularies differ.
        NonFiniteError: A logit is NaN or Inf.
    """
    divergences: list[Tensor] = []
    total, reference_total, agreed = 0.0, 0.0, 0
    with evaluating(model, reference):
        for batch in token_batches:
            logits = next_token_logits(model, checked_batch(batch))
            wanted = next_token_logits(reference, batch).to(logits.device)
            if wanted.shape != logits.shape:
                raise ConfigError(
                    f"the model predicts {logits.shape[-1]} tokens and the reference {wanted.shape[-1]}: compare models of one vocabulary"
                )
            targets = batch[:, 1:].flatten().to(logits.device)
            for q, p, t in in_chunks(logits, wanted, targets):
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
    """KL(p ‖ q) of each row, in nats, float64, never below 0. Both ``[N, V]``, log-probabilities; a token with p = 0 counts 0."""
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    # Rounding can leave a sum of terms of both signs a hair below zero, which no divergence is.
    return terms.sum(-1, dtype=torch.float64).clamp_(min=0)


def _percentile(values: Tensor, percent: int) -> float:
    """The smallest value that at least ``percent`` of a hundred do not exceed; takes any number of values, unlike `torch.quantile`."""
    return float(values.kthvalue(max(1, -(-values.numel() * percent // 100))).values)
