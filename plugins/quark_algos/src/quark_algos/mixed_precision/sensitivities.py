"""Sensitivities: the loss that is predicted for each group of layers in each candidate, comparable between layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from quark.selection import FLOAT, LayerGroup, SelectionProblem
from quark_algos.mixed_precision.gradients import output_gradients
from quark_algos.mixed_precision.measure import limited, measured_kl
from quark_algos.mixed_precision.output_errors import OutputErrors, output_errors

__all__ = ["SENSITIVITIES", "UNITS", "Losses", "losses_of"]

Losses = dict[str, dict[str, float]]
"""Predicted loss by group, then by candidate."""

UNITS: Mapping[str, str] = MappingProxyType(
    {"fisher": "nats per token", "kl": "nats per token", "output": "relative squared output error, summed over layers"}
)
"""Units of the losses of each sensitivity."""


def losses_of(problem: SelectionProblem, sensitivity: str, tokens: int) -> Losses:
    """Return the losses of all groups in all candidates that fit them.

    Args:
        problem: Has the model and the data.
        sensitivity: A key of `SENSITIVITIES`.
        tokens: About how many tokens of the data to use.
    """
    return SENSITIVITIES[sensitivity](problem, tokens)


def _fisher(problem: SelectionProblem, tokens: int) -> Losses:
    """Return ``½ Σ_o E g_o² · E δy_o²``, summed over the layers of a group: an estimate of the KL divergence in nats per token."""
    calls = limited(problem.data, tokens)
    gradients = output_gradients(problem, calls)
    total = max((own.tokens for own in gradients.values()), default=1)  # experts see fewer

    def loss(layer: str, errors: OutputErrors, name: str) -> float:
        own = gradients[layer]
        if not own.tokens or not errors.tokens:
            return 0.0  # no token has reached the layer
        weighted = own.channels * errors.squares[name].to(own.channels.device)  # type: ignore[union-attr]
        return float(weighted.sum()) / (2 * total * errors.tokens)

    return _summed(problem, output_errors(problem, calls), loss)


def _output(problem: SelectionProblem, tokens: int) -> Losses:
    """Return the squared output error ÷ the squared output, summed over the layers of a group."""
    errors = output_errors(problem, limited(problem.data, tokens))
    return _summed(problem, errors, lambda _, own, name: float(own.squares[name].sum()) / own.outputs if own.outputs else 0.0)


def _summed(problem: SelectionProblem, errors: Mapping[str, OutputErrors], loss: Callable[[str, OutputErrors, str], float]) -> Losses:
    def of(group: LayerGroup, name: str) -> float:
        return 0.0 if name == FLOAT else sum(loss(layer, errors[layer], name) for layer in group.layers if errors[layer].tokens)

    return {group.name: {name: of(group, name) for name in problem.sizes[group.name]} for group in problem.groups}


def _kl(problem: SelectionProblem, tokens: int) -> Losses:
    """Return the measured divergence of the model with one group quantized, and all others float."""
    singles = [(group.name, name) for group in problem.groups for name in problem.sizes[group.name] if name != FLOAT]
    measured = dict(zip(singles, measured_kl(problem, [{group: name} for group, name in singles], tokens), strict=True))
    return {group.name: {name: measured.get((group.name, name), 0.0) for name in problem.sizes[group.name]} for group in problem.groups}


SENSITIVITIES: Mapping[str, Callable[[SelectionProblem, int], Losses]] = MappingProxyType(
    {"fisher": _fisher, "kl": _kl, "output": _output}
)
"""By name: ``fisher`` takes one backward pass and one forward, ``kl`` a forward for each group and candidate, ``output`` one forward."""
