"""Checks of metrics: one finite number per token, no side effects, no randomness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quark_devkit.algorithm_runs import accelerator
from quark_devkit.check import check, require
from quark_devkit.subject import Subject

_TOKENS, _VOCABULARY, _LARGE = 12, 7, 5000
_TOLERANCE = 1e-6
"""Relative difference of float32 sums over a small vocabulary if rows are grouped differently.
"""

_STEP = 1e-4


def example(vocabulary: int = _VOCABULARY) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of a model, the right tokens, and log-probabilities of a reference model."""
    generator = torch.Generator().manual_seed(0)
    log_q, log_p = (torch.randn(_TOKENS, vocabulary, generator=generator, dtype=torch.float32).log_softmax(-1) for _ in range(2))
    return log_q, torch.arange(_TOKENS) % vocabulary, log_p


def metric_of(subject: Subject) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """Return a function that calls the metric. It passes the reference only if the record needs a
    reference."""
    metric, needs_reference = subject.load("metric"), subject.record.needs_reference
    return lambda log_q, targets, log_p: metric(log_q, targets, log_p if needs_reference else None)


def _require_numbers(values: Any, tokens: int) -> None:
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    require(
        isinstance(values, Tensor) and shape == (tokens,), f"returns {shape} for {tokens} tokens: return a tensor with one number for each"
    )
    require(bool(values.isfinite().all()), "returns NaN or Inf")


@check("metric")
def gives_a_number_for_each_token(subject: Subject) -> None:
    """The result is one finite number for each token."""
    log_q, targets, log_p = example()
    _require_numbers(metric_of(subject)(log_q, targets, log_p), _TOKENS)


@check("metric", since=2)
def takes_any_number_of_tokens(subject: Subject) -> None:
    """For one token and for no tokens, the result has one floating-point number for each token, and no
    autograd graph."""
    log_q, targets, log_p = example()
    for tokens in (1, 0):
        values = metric_of(subject)(log_q[:tokens], targets[:tokens], log_p[:tokens])
        _require_numbers(values, tokens)
        require(values.is_floating_point(), f"returns {values.dtype}: return floating-point numbers, since an evaluation takes their mean")
        require(not values.requires_grad, "returns numbers that require gradients, whose graphs fill the memory")


@check("metric")
def takes_excluded_tokens(subject: Subject) -> None:
    """The result stays finite if a model excludes a token (log-probability −Inf)."""
    log_q, targets, log_p = example()
    for log in (log_q, log_p):
        log[:, 0] = -torch.inf
        log.copy_(log.log_softmax(-1))
    targets = targets.clamp(min=1)
    _require_numbers(metric_of(subject)(log_q, targets, log_p), _TOKENS)


@check("metric")
def looks_at_each_token_alone(subject: Subject) -> None:
    """The number of a token does not depend on other tokens in the batch."""
    log_q, targets, log_p = example()
    metric = metric_of(subject)
    together = metric(log_q, targets, log_p)
    apart = torch.cat([metric(log_q[i : i + 5], targets[i : i + 5], log_p[i : i + 5]) for i in range(0, _TOKENS, 5)])
    is_close = together.shape == apart.shape and torch.allclose(together.double(), apart.double(), rtol=_TOLERANCE, atol=_TOLERANCE)
    require(is_close, "returns different numbers if the same tokens come in different batches")


@check("metric", since=2)
def depends_on_models_alone(subject: Subject) -> None:
    """Another model changes a number. Another reference also does, if the record needs a reference. If the
    entries of a large vocabulary are in another order, no number changes."""
    metric, (log_q, targets, log_p) = metric_of(subject), example(_LARGE)
    before, order = metric(log_q, targets, log_p).clone(), torch.randperm(_LARGE, generator=torch.Generator().manual_seed(1))
    again = metric(log_q[:, order].contiguous(), order.argsort()[targets], log_p[:, order].contiguous())
    is_close = torch.allclose(before.double(), again.double(), rtol=_TOLERANCE * 100, atol=_TOLERANCE * 100)
    require(is_close, f"returns different numbers if the {_LARGE} tokens of a vocabulary come in another order")
    certain = torch.nn.functional.one_hot(targets, _LARGE).to(log_q.dtype).mul(20).log_softmax(-1)
    others = {"model": [metric(model, targets, log_p) for model in (log_q.flip(0), certain, log_p)]}
    if subject.record.needs_reference:
        others["reference"] = [metric(log_q, targets, reference) for reference in (log_p.flip(0), certain, log_q)]
    same = [name for name, found in others.items() if all(torch.equal(values, before) for values in found)]
    require(not same, f"returns the same numbers for another {''.join(same[:1])}")


@check("metric", since=2)
def works_on_an_accelerator(subject: Subject) -> None:
    """For arguments on a (simulated) accelerator, the numbers are on the accelerator and equal the numbers on
    a CPU."""
    expected = metric_of(subject)(*example())
    with accelerator() as device:
        values = metric_of(subject)(*(tensor.to(device.name) for tensor in example()))
        require(values.device.type == device.name, "returns numbers on another device than its arguments, which are on an accelerator")
        is_close = torch.allclose(values.cpu().double(), expected.double(), rtol=_TOLERANCE, atol=_TOLERANCE)
    require(is_close, "returns different numbers on an accelerator than on the CPU")


@check("metric")
def changes_no_argument(subject: Subject) -> None:
    """The metric does not change its arguments, since other metrics use them too."""
    arguments, again = example(), example()
    metric_of(subject)(*arguments)
    names = ("log_q", "targets", "log_p")
    changed = [name for name, tensor, before in zip(names, arguments, again, strict=True) if not torch.equal(tensor, before)]
    require(not changed, f"changes its argument {', '.join(changed)}")


@check("metric")
def gives_the_same_again(subject: Subject) -> None:
    """The metric returns the same numbers each time."""
    metric = metric_of(subject)
    require(torch.equal(metric(*example()), metric(*example())), "returns different numbers the second time")


@check("metric", since=2)
def resolves_small_differences(subject: Subject) -> None:
    """If log-probabilities change by 1e-4, a number changes a hundredth as much as for a change of 1e-2.
    Metrics computed in 16 bits fail."""
    metric, (log_q, targets, log_p) = metric_of(subject), example()
    direction = torch.randn(log_q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    middle, *others = (metric((log_q + step * direction).clone(), targets, log_p).double() for step in (0.0, _STEP, 100 * _STEP))
    near, far = (other - middle for other in others)
    is_smooth = (far != far.round()) & (far.abs() > _STEP)  # otherwise the metric counts, as accuracy does
    lost = is_smooth & ((near - far / 100).abs() > 0.5 * far.abs() / 100 + _TOLERANCE * (1 + middle.abs()))
    require(not bool(lost.any()), f"changes by {float(near[lost][:1].sum()):.2g}, but {float(far[lost][:1].sum()) / 100:.2g} is expected")
