"""Sensitivities: the loss that is predicted for each group of layers in each candidate, comparable between layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from quark_workbench.mixed_precision import SelectionProblem
from quark_workbench.mixed_precision.by_sensitivity.fisher import divergences
from quark_workbench.mixed_precision.by_sensitivity.measure import limited, measured_kl
from quark_workbench.mixed_precision.by_sensitivity.output_errors import output_errors

__all__ = ["SENSITIVITIES", "UNITS", "Losses", "losses_of"]

Losses = dict[str, dict[str, float]]
"""Predicted loss by group, then by candidate."""

UNITS: Mapping[str, str] = MappingProxyType(
    {"fisher": "nats per token", "kl": "nats per token", "output": "squared output error per token"}
)
"""Units of the losses of each sensitivity."""


def losses_of(problem: SelectionProblem, sensitivity: str, tokens: int) -> Losses:
    """Return the losses of all groups in all candidates that fit them; a layer that stays float loses nothing.

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
    candidates = problem.candidates
    singles = [(group.name, name) for group in problem.groups for name in problem.sizes[group.name] if not candidates[name].is_float]
    measured = dict(zip(singles, measured_kl(problem, [{group: name} for group, name in singles], tokens), strict=True))
    return {group.name: {name: measured.get((group.name, name), 0.0) for name in problem.sizes[group.name]} for group in problem.groups}


SENSITIVITIES: Mapping[str, Callable[[SelectionProblem, int], Losses]] = MappingProxyType({"fisher": _fisher, "kl": _kl, "output": _output})
"""By name: ``fisher`` takes a forward and a backward pass, ``kl`` a forward for each group and candidate,
``output`` one forward.
"""
