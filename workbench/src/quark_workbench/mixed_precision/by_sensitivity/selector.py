"""MixedPrecision, a selector that predicts losses and finds the choice with the smallest predicted loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import attrs
from torch import nn

from quark.base.log import get_logger
from quark.calibration.batches import Call
from quark.errors import ConfigError
from quark.plugins import OptionNote
from quark.runs.memory import tokens_in
from quark_workbench.mixed_precision import CurvePoint, Selection, SelectionProblem
from quark_workbench.mixed_precision.by_sensitivity.fisher import divergences
from quark_workbench.mixed_precision.by_sensitivity.knapsack import best_choice, loss_of, pareto_curve
from quark_workbench.mixed_precision.by_sensitivity.measure import limited, measured_kl
from quark_workbench.mixed_precision.by_sensitivity.replaced_layers import BlockForms, quantizing, streamed

__all__ = ["SENSITIVITIES", "UNITS", "Losses", "MixedPrecision", "losses_of", "output_errors"]

Losses = dict[str, dict[str, float]]
"""For each group, a dictionary from name of candidate to predicted loss."""

UNITS: Mapping[str, str] = MappingProxyType(
    {"fisher": "nats per token", "kl": "nats per token", "output": "squared output error per token"}
)
"""Dictionary from a sensitivity to the unit of its losses."""


def losses_of(problem: SelectionProblem, sensitivity: str, tokens: int) -> Losses:
    """Return the predicted loss of each group in each candidate that fits. The loss of ``float`` is 0.

    Args:
        problem: The selection problem, which has the model and the data.
        sensitivity: A key of `SENSITIVITIES`, which selects the method of prediction.
        tokens: Approximate number of tokens to use.
    """
    return SENSITIVITIES[sensitivity](problem, tokens)


def _fisher(problem: SelectionProblem, tokens: int) -> Losses:
    return _summed(problem, divergences(problem, limited(problem.data, tokens)))


def _output(problem: SelectionProblem, tokens: int) -> Losses:
    return _summed(problem, output_errors(problem, limited(problem.data, tokens)))


def _summed(problem: SelectionProblem, by_layer: Mapping[str, Mapping[str, float]]) -> Losses:
    """Return the loss of each group in each candidate: the sum of the losses of its layers."""
    return {
        group.name: {name: sum(by_layer[layer].get(name, 0.0) for layer in group.layers) for name in problem.sizes[group.name]}
        for group in problem.groups
    }


def _kl(problem: SelectionProblem, tokens: int) -> Losses:
    """Return, for each group and candidate, the measured divergence if only this group is quantized."""
    singles = [(group.name, one.name) for group in problem.groups for one in quantizing(problem, group)]
    measured = dict(zip(singles, measured_kl(problem, [{group: name} for group, name in singles], tokens), strict=True))
    return {group.name: {name: measured.get((group.name, name), 0.0) for name in problem.sizes[group.name]} for group in problem.groups}


SENSITIVITIES: Mapping[str, Callable[[SelectionProblem, int], Losses]] = MappingProxyType({"fisher": _fisher, "kl": _kl, "output": _output})
"""Dictionary from the name of a sensitivity to its function. ``fisher`` needs a forward and a backward pass,
``kl`` a forward pass for each group and candidate, and ``output`` one forward pass.
"""


_TOKENS = 1024
"""Number of tokens in one step of the output error."""


def output_errors(problem: SelectionProblem, calls: Sequence[Call]) -> dict[str, dict[str, float]]:
    """Return the squared output error per token of each layer in each candidate's scheme.

    The result is a dictionary from full name of layer to a dictionary from candidate to error. The inputs of
    a layer are those in the float model, of which one block at a time is in memory.

    Args:
        problem: The selection problem. Its model does not change.
        calls: The batches of calibration data.
    """
    offered = {layer: quantizing(problem, group) for group in problem.groups for layer in group.layers}
    squares = {layer: {one.name: 0.0 for one in own} for layer, own in offered.items()}
    forms = BlockForms(problem)

    def replacement(name: str, layer: nn.Module, plain: Callable[..., Any], x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y = plain(x, *args, **kwargs)
        for part, wanted in zip(*(t.flatten(0, -2).split(_TOKENS) for t in (x, y)), strict=True):
            for one in offered[name]:
                squares[name][one.name] += float((forms.of(name, layer, one)(part) - wanted).float().square().sum())
        return y

    streamed(problem, calls, list(offered), replacement, to_the_end=False)
    tokens = max(1, tokens_in(calls))
    return {layer: {name: value / tokens for name, value in own.items()} for layer, own in squares.items()}


_STEPS = 8
"""Number of bisections of the interval of sizes, which is then 1/256 of its first length."""


def _known(_: object, attribute: object, value: str) -> None:
    if value not in SENSITIVITIES:
        raise ConfigError(f"there is no sensitivity {value!r}: use one of {', '.join(SENSITIVITIES)}")


def _at_least(least: int) -> Callable[[object, attrs.Attribute[int], int], None]:
    def check(_: object, attribute: attrs.Attribute[int], value: int) -> None:
        if value < least:
            raise ConfigError(f"{attribute.name}={value} is too small: give at least {least}")

    return check


@attrs.frozen(kw_only=True)
class MixedPrecision:
    """A selector that chooses the candidates with the smallest predicted loss under a budget.

    The choice is the exact solution of a knapsack problem.

    Attributes:
        sensitivity: The method that predicts losses. ``fisher`` weights output errors by the gradients of one
            backward pass, with the whole model in memory. ``output`` takes the output errors of one forward
            pass, block by block. ``kl`` measures the KL divergence in one forward pass for each group and
            candidate.
        tokens: Approximate number of calibration tokens for the prediction.
        points: Number of points of the Pareto curve, at least 2.
        measured: Number of points of the curve whose divergence is measured, in addition to the chosen point.
            With 0, nothing is measured for a budget of bits or bytes.
        measured_tokens: Approximate number of calibration tokens for a measurement.

    Raises:
        ConfigError: A value is out of its range.
    """

    sensitivity: str = attrs.field(default="fisher", validator=_known)
    tokens: Annotated[int, OptionNote(examples=(48,))] = attrs.field(default=8192, validator=_at_least(1))
    points: Annotated[int, OptionNote(examples=(2, 3))] = attrs.field(default=25, validator=_at_least(2))
    measured: int = attrs.field(default=3, validator=_at_least(0))
    measured_tokens: Annotated[int, OptionNote(examples=(48,))] = attrs.field(default=1024, validator=_at_least(1))

    def select(self, problem: SelectionProblem) -> Selection:
        """Solve a problem as the protocol `quark_workbench.mixed_precision.SchemeSelector` requires."""
        return self.select_by(problem, losses_of(problem, self.sensitivity, self.tokens))

    def select_by(self, problem: SelectionProblem, losses: Losses) -> Selection:
        """Return the selection for predicted losses. The same losses can be used again for another budget."""
        curve = pareto_curve(losses, problem.sizes, self.points)
        if problem.most_bytes is not None:
            choices = best_choice(losses, problem.sizes, problem.most_bytes)
            curve = self._measured(problem, _by_size([*curve, _point(problem, losses, choices)]), choices)
        else:
            curve, choices = self._within_divergence(problem, losses, curve)
        return Selection(choices, losses, UNITS[self.sensitivity], curve, tuple(_notes(curve, self.sensitivity)))

    def _measured(self, problem: SelectionProblem, curve: Sequence[CurvePoint], choices: Mapping[str, str]) -> tuple[CurvePoint, ...]:
        """Return the curve with measured divergences at the chosen point and at equally spaced points."""
        if not self.measured:
            return tuple(curve)
        own = problem.bytes_of(choices)
        spread = {round(i * (len(curve) - 1) / max(1, self.measured - 1)) for i in range(self.measured)}
        wanted = [i for i, point in enumerate(curve) if i in spread or point.group_bytes == own]
        values = dict(zip(wanted, measured_kl(problem, [curve[i].choices for i in wanted], self.measured_tokens), strict=True))
        return tuple(attrs.evolve(point, measured_kl=values.get(i)) for i, point in enumerate(curve))

    def _within_divergence(
        self, problem: SelectionProblem, losses: Losses, curve: tuple[CurvePoint, ...]
    ) -> tuple[tuple[CurvePoint, ...], dict[str, str]]:
        """Return the curve, and the smallest found choice whose measured divergence is within the budget.

        Raises:
            ConfigError: Not even the largest choice meets the budget. The message names the divergences that
                the smallest and the largest choice reach.
        """
        most = problem.budget.kl or 0.0
        ends = [curve[0], curve[-1]]
        lowest, highest = measured_kl(problem, [point.choices for point in ends], self.measured_tokens)
        found = {ends[0].group_bytes: attrs.evolve(ends[0], measured_kl=lowest)}
        found[ends[1].group_bytes] = attrs.evolve(ends[1], measured_kl=highest)
        if highest > most:
            raise ConfigError(
                f"a divergence of {most:g} nats per token cannot be met with {', '.join(problem.candidates)}: they reach {highest:.4g} to "
                f"{lowest:.4g}. Give a larger budget, or a larger candidate such as bf16"
            )
        low, high = ends[0].group_bytes, ends[1].group_bytes
        for _ in range(_STEPS if lowest > most else 0):
            point = _point(problem, losses, best_choice(losses, problem.sizes, (low + high) // 2))
            if point.group_bytes not in found:
                value = measured_kl(problem, [point.choices], self.measured_tokens)[0]
                found[point.group_bytes] = attrs.evolve(point, measured_kl=value)
            if (found[point.group_bytes].measured_kl or 0.0) <= most:
                high = point.group_bytes
            else:
                low = (low + high) // 2
        within = min(size for size, point in found.items() if point.measured_kl is not None and point.measured_kl <= most)
        return _by_size([*curve, *found.values()]), dict(found[within].choices)


def _point(problem: SelectionProblem, losses: Losses, choices: Mapping[str, str]) -> CurvePoint:
    return CurvePoint(problem.bytes_of(choices), loss_of(losses, choices), choices)


def _by_size(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Return points in ascending order of size. Of several points with the same size, keep the last."""
    by_size = {point.group_bytes: point for point in points}
    return tuple(by_size[size] for size in sorted(by_size))


def _notes(curve: Sequence[CurvePoint], sensitivity: str) -> list[str]:
    """Return a note on the ratio of measured to predicted divergence, if it is known at two points."""
    pairs = [(point.loss, point.measured_kl) for point in curve if point.measured_kl is not None and point.loss > 0]
    if sensitivity == "output" or len(pairs) < 2:
        return []
    ratios = [measured / predicted for predicted, measured in pairs]
    note = f"measured divergence is {min(ratios):.2f} to {max(ratios):.2f} times the predicted one, at {len(ratios)} points of the curve"
    get_logger(__name__).info(f"Mixed precision: {note}.")
    return [note]
