"""Metrics with one thing wrong each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quark.base.lazy import ObjectRef
from quark.plugins import MetricRecord

from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS", "OF_RIGHT_TOKENS"]


def healthy(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return log_q.amax(-1)


def right_tokens(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return -log_q.gather(-1, targets[:, None])[:, 0]


def mean(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return log_q.amax(-1).mean()


def infinite(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return torch.full(targets.shape, torch.inf)


def plain_entropy(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return -(log_q.exp() * log_q).sum(-1)  # 0 × −Inf is NaN


def centred(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return log_q.amax(-1) - log_q.amax(-1).mean()


def sorting(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    log_q.copy_(log_q.sort(-1).values)
    return log_q[:, -1]


def dropping(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return torch.rand(targets.shape)


def undeclared(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return (log_q - log_p).abs().sum(-1)


def squeezed(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return log_q.gather(-1, targets[:, None]).squeeze()


def is_right(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return log_q.argmax(-1) == targets


def with_a_graph(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return log_q.amax(-1) * nn.Parameter(torch.ones(()))


def in_half(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return log_q.half().amax(-1).float()


def of_the_first_tokens(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return log_q[:, :1000].amax(-1)


def of_the_cpu(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return (log_q * torch.ones(log_q.shape[-1])).amax(-1)


def record_of(metric: Callable[..., Tensor], **fields: Any) -> MetricRecord:
    return MetricRecord(name="mutant_metric", metric=ObjectRef(metric), **fields)


def mutant(check: str, about: str, metric: Callable[..., Any], **fields: Any) -> Mutant:
    return Mutant(f"metric:{check}", about, (record_of(metric, **fields),))


HEALTHY = (record_of(healthy),)
OF_RIGHT_TOKENS = (record_of(right_tokens),)
MUTANTS = [
    mutant("depends_on_models_alone", "looks at the first tokens of a vocabulary", of_the_first_tokens),
    mutant("depends_on_models_alone", "does not look at the reference", healthy, needs_reference=True),
    mutant("works_on_an_accelerator", "multiplies by a tensor that it makes on the CPU", of_the_cpu),
    mutant("resolves_small_differences", "computes in half precision", in_half),
    mutant("gives_a_number_for_each_token", "gives one number for all", mean),
    mutant("gives_a_number_for_each_token", "gives infinity", infinite),
    mutant("gives_a_number_for_each_token", "needs a reference that its record does not ask for", undeclared),
    mutant("takes_any_number_of_tokens", "gives a scalar for one token", squeezed),
    mutant("takes_any_number_of_tokens", "gives booleans", is_right),
    mutant("takes_any_number_of_tokens", "keeps the graph of its numbers", with_a_graph),
    mutant("takes_excluded_tokens", "multiplies 0 by infinity", plain_entropy),
    mutant("looks_at_each_token_alone", "subtracts the mean of the batch", centred),
    mutant("changes_no_argument", "sorts in place", sorting),
    mutant("gives_the_same_again", "is random", dropping),
]
