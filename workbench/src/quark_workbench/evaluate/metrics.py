"""Metrics that compute a number for each predicted token, and means of such numbers with standard errors.

A metric is a function of three arguments: the log-probabilities ``log_q`` of the model, ``[N, V]``; the right
tokens ``targets``, ``[N]``; and the log-probabilities ``log_p`` of the reference, ``[N, V]``, which may be
None. A metric changes no argument. Each value depends only on the row of its token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from quark.errors import ConfigError
from quark.plugins import metrics
from quark.plugins.attribution import attributed, origin

__all__ = ["Mean", "TokenMetrics", "accuracy", "entropy", "mean_over", "percentile", "total_variation"]


def accuracy(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    """Return N values ``[N]``: 1 if the model's most likely token is the right token, or else 0."""
    return (log_q.argmax(-1) == targets).double()


def entropy(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    """Return the entropy ``[N]`` of each prediction of the model, in nats.

    The entropy is 0 if one token has the probability 1.
    """
    q = log_q.exp()
    return -torch.where(q > 0, q * log_q, 0.0).sum(-1, dtype=torch.float64)


def total_variation(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    """Return the total variation distance ½ Σ |q − p| of each prediction: N values ``[N]`` from 0 to 1."""
    assert log_p is not None
    return (log_q.exp() - log_p.exp()).abs().sum(-1, dtype=torch.float64) / 2


@attrs.define(eq=False)
class TokenMetrics:
    """Collects the values of registered metrics during an evaluation.

    Attributes:
        names: Names of the metrics.
        columns: Dictionary from name of metric to a list of tensors. Each tensor has the values for one chunk
            of tokens.
    """

    names: tuple[str, ...] = ()
    columns: dict[str, list[Tensor]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.columns = {name: [] for name in self.names}

    @classmethod
    def of(cls, names: Sequence[str], *, has_reference: bool) -> TokenMetrics:
        """Return an object for the metrics in ``names`` that has no values yet.

        Raises:
            UnknownNameError: (a ValueError) There is no metric with this name.
            ConfigError: A metric needs a reference, but there is none.
        """
        for name in names:
            if metrics().get(name).needs_reference and not has_reference:
                raise ConfigError(f"the metric '{name}' compares with a reference model: add --reference MODEL")
        return cls(tuple(dict.fromkeys(names)))

    def add(self, log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> None:
        """Compute all metrics for a chunk of N tokens, and add the values. The arguments are as in metrics.

        Raises:
            PluginError: A metric raised an error, or did not return a finite number for each token.
        """
        for name in self.names:
            whose = origin("metrics", name)
            with attributed("evaluating", whose):
                values = metrics().load_metric(name)(log_q, targets, log_p if metrics().get(name).needs_reference else None)
            if not isinstance(values, Tensor) or values.shape != targets.shape or not bool(values.isfinite().all()):
                raise whose.error(f"does not return one finite number for each of {len(targets)} tokens")
            self.columns[name].append(values.double().cpu())

    def means(self, window: Tensor) -> dict[str, Mean]:
        """Return a dictionary from name of metric to the mean of its values.

        ``window [N]`` has the number of each token's window.
        """
        return {name: mean_over(torch.cat(values), window) for name, values in self.columns.items()}


@attrs.frozen
class Mean:
    """A mean and its standard error.

    Attributes:
        value: The mean over predictions.
        error: The standard error of the mean; None if there is only one window.
    """

    value: float
    error: float | None

    def exp(self) -> Mean:
        """Return the exponential of the mean. Its standard error is a first-order approximation.

        If the exponential overflows, the value is infinity and the error is None.
        """
        try:
            value = math.exp(self.value)
        except OverflowError:
            return Mean(math.inf, None)
        return Mean(value, None if self.error is None else value * self.error)


def mean_over(values: Tensor, window: Tensor) -> Mean:
    """Return the mean of values, with a standard error that assumes only that windows are independent.

    Tokens of one window are correlated, so an error that assumes independent tokens would be too small.
    Source: cluster-robust standard errors, Liang and Zeger 1986, with the correction W / (W − 1) for W
    windows.

    Args:
        values: The values, ``[N]``, float64.
        window: The number of each value's window, ``[N]``, int64.
    """
    mean = values.mean()
    _, index = window.unique(return_inverse=True)
    count = int(index.max()) + 1
    if count < 2:
        return Mean(float(mean), None)
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, index, values - mean)
    return Mean(float(mean), float(sums.square().sum().sqrt()) / len(values) * math.sqrt(count / (count - 1)))


def percentile(values: Tensor, percent: float) -> float:
    """Return the smallest of the values such that at least ``percent`` % of the values are not larger.

    `torch.quantile` is not used, because it accepts only a limited number of values.
    """
    return float(values.kthvalue(max(1, math.ceil(values.numel() * percent / 100 - 1e-9))).values)
