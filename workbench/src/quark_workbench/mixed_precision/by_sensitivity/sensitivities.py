"""Sensitivities: the predicted loss of each group of layers in each candidate, comparable between layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from quark.calibration.batches import Call
from quark.calibration.forwards import current_forward
from quark.calibration.pause_points import tokens_of
from quark.runs.memory import tokens_in
from quark_workbench.mixed_precision import SelectionProblem
from quark_workbench.mixed_precision.by_sensitivity.fisher import divergences
from quark_workbench.mixed_precision.by_sensitivity.measure import limited, measured_kl
from quark_workbench.mixed_precision.by_sensitivity.replaced_layers import BlockForms, quantizing, streamed

__all__ = ["SENSITIVITIES", "UNITS", "Losses", "losses_of", "output_errors"]

Losses = dict[str, dict[str, float]]
"""Predicted loss by group, then by candidate."""

UNITS: Mapping[str, str] = MappingProxyType(
    {"fisher": "nats per token", "kl": "nats per token", "output": "squared output error per token"}
)
"""Units of the losses of each sensitivity."""


def losses_of(problem: SelectionProblem, sensitivity: str, tokens: int) -> Losses:
    """Return the losses of all groups in all candidates that fit; a layer that stays float loses nothing.

    Args:
        problem: Has the model and the data.
        sensitivity: A key of `SENSITIVITIES`.
        tokens: About how many tokens of the data to use.
    """
    return SENSITIVITIES[sensitivity](problem, tokens)


def _fisher(problem: SelectionProblem, tokens: int) -> Losses:
    return _summed(problem, divergences(problem, limited(problem.data, tokens)))


def _output(problem: SelectionProblem, tokens: int) -> Losses:
    return _summed(problem, output_errors(problem, limited(problem.data, tokens)))


def _summed(problem: SelectionProblem, by_layer: Mapping[str, Mapping[str, float]]) -> Losses:
    """Return the losses of layers, summed over each group."""
    return {
        group.name: {name: sum(by_layer[layer].get(name, 0.0) for layer in group.layers) for name in problem.sizes[group.name]}
        for group in problem.groups
    }


def _kl(problem: SelectionProblem, tokens: int) -> Losses:
    """Return the measured divergence of the model with one group quantized, and all others float."""
    singles = [(group.name, one.name) for group in problem.groups for one in quantizing(problem, group)]
    measured = dict(zip(singles, measured_kl(problem, [{group: name} for group, name in singles], tokens), strict=True))
    return {group.name: {name: measured.get((group.name, name), 0.0) for name in problem.sizes[group.name]} for group in problem.groups}


SENSITIVITIES: Mapping[str, Callable[[SelectionProblem, int], Losses]] = MappingProxyType({"fisher": _fisher, "kl": _kl, "output": _output})
"""By name: ``fisher`` takes a forward and a backward pass, ``kl`` a forward for each group and candidate,
``output`` one forward.
"""


_TOKENS = 1024
"""Tokens whose outputs are computed at a time."""


def output_errors(problem: SelectionProblem, calls: Sequence[Call]) -> dict[str, dict[str, float]]:
    """Return the squared output error per token, by full name of layer, then by candidate that quantizes it.

    The forward is that of the float model; one block of it is in memory at a time.

    Args:
        problem: Has the model; nothing in it is changed.
        calls: The batches.
    """
    offered = {layer: quantizing(problem, group) for group in problem.groups for layer in group.layers}
    squares = {layer: {one.name: 0.0 for one in own} for layer, own in offered.items()}
    forms = BlockForms(problem)

    def replacement(name: str, layer: nn.Module, plain: Callable[..., Any], x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward: Any = current_forward()
        y = plain(x, *args, **kwargs)
        for part, wanted in zip(*(tokens_of(t, forward.call).split(_TOKENS) for t in (x, y)), strict=True):
            for one in offered[name]:
                squares[name][one.name] += float((forms.of(name, layer, one)(part) - wanted).float().square().sum())
        return y

    streamed(problem, calls, list(offered), replacement, to_the_end=False)
    tokens = max(1, tokens_in(calls))
    return {layer: {name: value / tokens for name, value in own.items()} for layer, own in squares.items()}
