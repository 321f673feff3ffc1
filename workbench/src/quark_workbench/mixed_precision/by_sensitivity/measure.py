"""Measurement of the KL divergence of next tokens that a choice of schemes causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.calibration.batches import Call
from quark.calibration.forwards import current_forward
from quark.errors import NonFiniteError
from quark.runs.memory import tokens_in
from quark_workbench.evaluate.predictions import kl_divergence
from quark_workbench.mixed_precision import SelectionProblem
from quark_workbench.mixed_precision.by_sensitivity.replaced_layers import BlockForms, streamed

__all__ = ["limited", "measured_kl"]

_HELD = 1 << 28
"""Largest number of elements of hidden states of waiting forward passes (1 GiB in float32).

If there are more choices, the model runs several times.
"""


@attrs.frozen(eq=False, kw_only=True)
class _Forward(Call):
    """A forward pass of the model under one choice, or of the float model.

    Attributes:
        candidate_of: Dictionary from full name of layer to name of candidate; empty for the float model.
        finished: Function that is called with the logits of all tokens, ``[tokens, V]``.
    """

    candidate_of: Mapping[str, str]
    finished: Callable[[Tensor], None]

    def run(self, model: nn.Module) -> Any:
        output = Call.run(self, model)
        logits: Tensor = getattr(output, "logits", output)
        self.finished(logits.flatten(0, -2))


def limited(data: Sequence[Call], tokens: int) -> list[Call]:
    """Return as many calls as are needed for ``tokens`` tokens, from the start of ``data``.

    If ``data`` has fewer tokens, return all calls.
    """
    taken: list[Call] = []
    count = 0
    for call in data:
        if taken and count >= tokens:
            break
        taken.append(call)
        count += tokens_in([call])
    return taken


def measured_kl(problem: SelectionProblem, choices: Sequence[Mapping[str, str]], tokens: int) -> list[float]:
    """Return the mean KL divergence from the float model for each of several choices, in nats per token.

    Weights are rounded to nearest. If a scheme has static input scales, these scales are computed anew for
    each batch. All choices run block by block in lockstep, so that a block is read once for many choices.

    Args:
        problem: The selection problem, which has the model and the data.
        choices: Dictionaries from name of group to candidate. Groups that a dictionary lacks stay float.
        tokens: Approximate number of tokens to measure on.

    Raises:
        NonFiniteError: Logits hold NaN or Inf.
    """
    data = limited(problem.data, tokens)
    width = max((shape[1] for group in problem.groups for shape in group.shapes.values()), default=1)
    at_once = max(1, _HELD // max(1, width * tokens_in(data)) - 1)
    layers = {group.name: group.layers for group in problem.groups}
    by_layer = [{layer: name for group, name in one.items() for layer in layers[group]} for one in choices]
    values: list[float] = []
    for start in range(0, len(by_layer), at_once):
        values += _measured(problem, by_layer[start : start + at_once], data)
    return values


def _measured(problem: SelectionProblem, choices: Sequence[Mapping[str, str]], data: Sequence[Call]) -> list[float]:
    """Return the mean KL divergence for each choice. A choice is a dictionary from layer to candidate."""
    reference: dict[int, Tensor] = {}
    sums, count = [0.0] * len(choices), 0

    def finished(choice: int | None, number: int, logits: Tensor) -> None:
        nonlocal count
        log_p = _log_probabilities(logits)
        if choice is None:
            reference[number] = log_p
            count += len(log_p)
        else:
            sums[choice] += float(kl_divergence(reference[number], log_p).sum())

    forms = BlockForms(problem)

    def replacement(name: str, layer: nn.Module, plain: Callable[..., Any], x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward: Any = current_forward()
        chosen = problem.candidates.get(forward.call.candidate_of.get(name, ""))
        if chosen is None or chosen.is_float:
            return plain(x, *args, **kwargs)
        return forms.of(name, layer, chosen)(x)

    # The float model's forwards come first, so that the others find its log-probabilities.
    every: list[tuple[int | None, Mapping[str, str]]] = [(None, {}), *enumerate(choices)]
    forwards = [
        _Forward(args=call.args, kwargs=call.kwargs, candidate_of=one, finished=partial(finished, choice, number))
        for choice, one in every
        for number, call in enumerate(data)
    ]
    streamed(problem, forwards, sorted({layer for one in choices for layer in one}), replacement, to_the_end=True)
    return [value / count for value in sums]


def _log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-probabilities for logits ``[tokens, V]``, in float32."""
    if not bool(torch.isfinite(logits.sum(dtype=torch.float64))):
        raise NonFiniteError("the logits hold NaN or Inf, so no divergence can be measured: try another dtype or scheme", tensor="logits")
    return torch.log_softmax(logits.float(), -1)
