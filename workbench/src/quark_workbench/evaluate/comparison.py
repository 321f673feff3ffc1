"""Comparison of a model with its reference over the same tokens: KL divergence and both perplexities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
from torch import Tensor, nn

from quark_workbench.evaluate.metrics import Mean, mean_over, percentile
from quark_workbench.evaluate.perplexity import perplexity_of
from quark_workbench.evaluate.predictions import Predictions, predictions_of
from quark_workbench.evaluate.windows import Windows

__all__ = ["Comparison", "compare", "comparison_of"]


@attrs.frozen(kw_only=True)
class Comparison:
    """Metrics of a model and its reference over the same tokens.

    KL means KL(reference ‖ model) of one predicted token, in nats. It is 0 if both models predict the same
    probabilities.

    An attribute whose name ends in ``_error`` is the standard error of the attribute before it. It assumes
    that windows are independent, and is None for a single window. The statistics are those that
    ``llama-perplexity --kl-divergence`` prints.

    Attributes:
        mean_kl: Mean KL over tokens.
        median_kl: Median KL over tokens.
        p90_kl: 90th percentile of KL over tokens.
        p99_kl: 99th percentile of KL over tokens.
        p999_kl: 99.9th percentile of KL over tokens.
        max_kl: Largest KL of a token.
        top1_agreement: Share of tokens for which both models predict the same most likely next token, 0 to 1.
        probability_shift: Mean over tokens of a difference: the probability of the right token in the model
            minus its probability in the reference. It is between −1 and 1.
        probability_shift_rms: Root mean square of the same difference.
        perplexity: Perplexity of the model.
        reference_perplexity: Perplexity of the reference.
        perplexity_ratio: ``perplexity`` ÷ ``reference_perplexity``. Its standard error comes from paired
            differences, so it is far smaller than the standard errors of the perplexities.
        tokens: The number of compared predictions.
        metrics: Dictionary from the name of a registered metric to its mean.
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


def compare(model: nn.Module, reference: nn.Module, token_batches: Iterable[Tensor | Windows], metrics: Sequence[str] = ()) -> Comparison:
    """Compare next-token predictions batch by batch. Only a few numbers per token stay in memory.

    Args:
        model: As for `quark_workbench.evaluate.perplexity`.
        reference: A model with the same vocabulary; it may be on another device.
        token_batches: As for `quark_workbench.evaluate.perplexity`.
        metrics: Names of further metrics to measure, from `quark.metrics`.

    Raises:
        ConfigError: There is no batch, a batch has a wrong shape, or the vocabularies differ.
        UnknownNameError: (a ValueError) There is no such metric.
        NonFiniteError: A logit is NaN or Inf.
    """
    return comparison_of(predictions_of([model, reference], token_batches, metrics))


def comparison_of(predictions: Predictions) -> Comparison:
    """Return the `Comparison` of a model with its reference.

    Raises:
        ConfigError: There are no predictions.
    """
    kl, agrees, log_q, log_p, window = map(predictions.column, ("kl", "agrees", "log_q", "log_p", "window"))
    shift = log_q.exp() - log_p.exp()
    mean_kl, top1, mean_shift = (mean_over(values, window) for values in (kl, agrees, shift))
    own, other, ratio = (perplexity_of(nats, window, predictions.words) for nats in (-log_q, -log_p, log_p - log_q))
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
        metrics=predictions.metrics.means(window),
    )
