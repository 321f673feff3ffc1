"""The predictions of a model and of its reference over the same tokens, stored as a few numbers per token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor, nn

from quark.base.torch_state import own_torch_state
from quark.errors import ConfigError
from quark.plugins.run_events import running
from quark_workbench.evaluate.logits import NextTokens, evaluating, in_chunks, log_probabilities, next_token_logits, windows_of
from quark_workbench.evaluate.metrics import TokenMetrics
from quark_workbench.evaluate.windows import Windows

__all__ = ["Predictions", "kl_divergence", "predictions_of"]


@attrs.define(eq=False)
class Predictions:
    """A table with a row for each scored token, to which an evaluation adds batch by batch.

    The column ``log_q`` has the model's log-likelihood of the right token, and ``window`` the number of the
    token's window. With a reference, there are three more columns: ``log_p`` has the reference's
    log-likelihood, ``kl`` the KL divergence in nats, and ``agrees`` is 1 if both models predict the same most
    likely token.

    Attributes:
        metrics: The values of the registered metrics.
        words: Number of words of the text if results are per word, or else None.
    """

    metrics: TokenMetrics = attrs.field(factory=TokenMetrics)
    words: int | None = None
    _columns: dict[str, list[Tensor]] = attrs.field(factory=lambda: defaultdict(list), init=False)

    def add(self, windows: Windows, predicted: NextTokens, expected: NextTokens | None = None) -> None:
        """Add the tokens of one batch of windows.

        ``predicted`` has the logits of the model. ``expected`` has those of the reference, or is None.

        Raises:
            ConfigError: The vocabularies differ.
            NonFiniteError: A logit is NaN or Inf.
        """
        logits, targets, window = predicted
        rows = [logits, targets.to(logits.device)]
        if expected is not None:
            rows.append(expected.logits.to(logits.device))
            if expected.logits.shape != logits.shape:
                raise ConfigError(
                    f"the model's vocabulary has {logits.shape[-1]} tokens, the reference's {expected.logits.shape[-1]}: compare models "
                    f"of one vocabulary"
                )
        for part, chosen, *reference in in_chunks(*rows):
            log_q = log_probabilities(part, "model")
            log_p = log_probabilities(reference[0], "reference") if reference else None
            self.metrics.add(log_q, chosen, log_p)
            self._columns["log_q"].append(_log_likelihood(log_q, chosen))
            if log_p is not None:
                self._columns["log_p"].append(_log_likelihood(log_p, chosen))
                self._columns["kl"].append(kl_divergence(log_p, log_q).cpu())
                self._columns["agrees"].append((log_q.argmax(-1) == log_p.argmax(-1)).double().cpu())
        before = self._columns["window"]
        before.append(window + (int(before[-1][-1]) + 1 if before else 0))
        self.words = windows.words

    def column(self, name: str) -> Tensor:
        """Return the column with this name as a tensor ``[N]``.

        Raises:
            ConfigError: There are no tokens.
        """
        if not self._columns[name]:
            raise ConfigError("the batches are empty: give at least one window of tokens")
        return torch.cat(self._columns[name])


def predictions_of(models: Sequence[nn.Module], token_batches: Iterable[Tensor | Windows], metrics: Sequence[str]) -> Predictions:
    """Return the `Predictions` of the first model, with the second as reference if there are two.

    Other arguments and the errors are as in `quark_workbench.evaluate.compare`.
    """
    predictions = Predictions(TokenMetrics.of(metrics, has_reference=len(models) > 1))
    with own_torch_state(), running("evaluate", source=type(models[0]).__name__) as events, evaluating(*models):
        events.phase("evaluate")
        for windows in events.batches(windows_of(token_batches), of=token_batches):
            predictions.add(windows, *(next_token_logits(model, windows) for model in models))
    return predictions


def _log_likelihood(log_p: Tensor, targets: Tensor) -> Tensor:
    """Return ``log_p[row, targets[row]]`` for each row, as a float64 tensor ``[N]`` on the CPU.

    ``log_p`` has the shape ``[N, V]``, and ``targets`` has the shape ``[N]``.
    """
    return log_p.gather(-1, targets[:, None])[:, 0].double().cpu()


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) of each row in nats, as float64. The log-probabilities have the shape ``[N, V]``.

    The result is at least 0. A token with p = 0 contributes 0.
    """
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    # Rounding errors can make the sum slightly negative, which no divergence is.
    return terms.sum(-1, dtype=torch.float64).clamp_(min=0)
