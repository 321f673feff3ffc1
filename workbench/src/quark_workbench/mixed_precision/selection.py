"""Selection: the choice and curve of a selector, the result with a configuration, and the protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import attrs

from quark.config.model import QConfig
from quark.errors import ConfigError, PluginError
from quark.plugins import selectors
from quark.plugins.attribution import attributed, origin
from quark.plugins.options import called, checked
from quark_workbench.mixed_precision.problem import Choices, SelectionProblem

__all__ = ["CurvePoint", "SchemeSelector", "Selection", "SelectionResult", "checked_selection", "selector_of"]


@attrs.frozen
class CurvePoint:
    """A point of the Pareto curve. No other choice with at most as many bytes has a smaller loss.

    Attributes:
        group_bytes: Bytes of the groups.
        loss: Predicted loss.
        choices: Candidate by group.
        measured_kl: Mean KL divergence from the float model on calibration tokens, in nats per token; None if
            not measured.
    """

    group_bytes: int
    loss: float
    choices: Choices = attrs.field(repr=False, hash=False)
    measured_kl: float | None = None


@attrs.frozen
class Selection:
    """The result of a selector.

    Attributes:
        choices: The candidate for each group of the problem.
        losses: Predicted loss by group, then by candidate. Empty if the selector predicts no loss.
        unit: Unit of the losses, such as ``"nats per token"``.
        curve: The Pareto curve in ascending order of bytes; may be empty.
        notes: Remarks for the user.
    """

    choices: Choices
    losses: Mapping[str, Mapping[str, float]] = attrs.field(factory=dict)
    unit: str = ""
    curve: tuple[CurvePoint, ...] = ()
    notes: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class SelectionResult:
    """A selection with its problem and the resulting configuration.

    Attributes:
        config: The configuration, for planning, quantization and export.
        selection: The choice.
        problem: The problem.
        selector: Name of the selector; None if an object was given.
        seconds: How long the selector took.
    """

    config: QConfig
    selection: Selection
    problem: SelectionProblem = attrs.field(repr=False)
    selector: str | None = None
    seconds: float = 0.0

    @property
    def group_bytes(self) -> int:
        """Bytes of the groups under the choices."""
        return self.problem.bytes_of(self.selection.choices)

    @property
    def bits(self) -> float:
        """Stored bits per weight under the choices."""
        return self.problem.bits_of(self.group_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors of the checkpoint under the choices."""
        return self.group_bytes + self.problem.other_bytes

    @property
    def loss(self) -> float | None:
        """The predicted loss of the choices, or None if the selector predicts no loss."""
        losses = self.selection.losses
        return sum(losses[group][name] for group, name in self.selection.choices.items()) if losses else None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: problem, choices, losses and curve, for reports and pictures."""
        problem, selection = self.problem, self.selection
        return {
            "selector": self.selector,
            "seconds": round(self.seconds, 3),
            "budget": {name: value for name, value in attrs.asdict(problem.budget).items() if value is not None},
            "candidates": list(problem.candidates),
            "weights": problem.weights,
            "bits": self.bits,
            "group_bytes": self.group_bytes,
            "total_bytes": self.total_bytes,
            "loss": self.loss,
            "unit": selection.unit,
            "choices": dict(selection.choices),
            "layers": {group.name: list(group.layers) for group in problem.groups},
            "sizes": {name: dict(sizes) for name, sizes in problem.sizes.items()},
            "losses": {name: dict(losses) for name, losses in selection.losses.items()},
            "curve": [_point(problem, point) for point in selection.curve],
            "notes": list(selection.notes),
        }


def _point(problem: SelectionProblem, point: CurvePoint) -> dict[str, Any]:
    return {
        "bits": problem.bits_of(point.group_bytes),
        "total_bytes": point.group_bytes + problem.other_bytes,
        "loss": point.loss,
        "measured_kl": point.measured_kl,
        "groups": dict(Counter(point.choices.values())),
    }


@runtime_checkable
class SchemeSelector(Protocol):
    """Chooses a scheme for each group of layers.

    The class must be callable without arguments; its keyword arguments are options.
    """

    def select(self, problem: SelectionProblem) -> Selection:
        """Return one candidate in ``problem.sizes`` for each group, within the budget.

        Do not change the model. Return the same choice for the same problem.

        Raises:
            ConfigError: No choice meets the budget.
        """


def selector_of(name: str | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, SchemeSelector]:
    """Return the name of a registered selector, and the selector with the options.

    Args:
        name: Name of the selector; None for the only installed one.
        options: Options of the selector, by name.

    Raises:
        ConfigError: No selector is installed, several are installed but none is named, or the selector has
            no such option.
        UnknownNameError: There is no selector with this name.
        PluginError: The selector cannot be created, or has no method ``select``.
    """
    names = selectors().names()
    if name is None:
        if len(names) != 1:
            package = selectors().kind.distribution
            missing = f"none is installed. The built-in selector comes with {package}: pip install {package}"
            said = f"several are installed, {', '.join(names)}: name one of them" if names else missing
            raise ConfigError(f"a selector chooses the scheme of each layer, and {said}")
        name = names[0]
    make = selectors().load_selector(name)
    given = checked(f"the selector '{name}'", selectors().options(name), options or {})
    whose = origin("selectors", name)
    with attributed("being created", whose):
        selector = called(f"the selector '{name}'", make, given)
    if not isinstance(selector, SchemeSelector):
        raise whose.error(f"creates a {type(selector).__name__}, which has no method select(problem)")
    return selectors().get(name).name, selector


def checked_selection(problem: SelectionProblem, selection: object, whose: str) -> Selection:
    """Return the result of a selector as a valid `Selection`.

    Args:
        problem: The problem.
        selection: The result of the selector.
        whose: Name of the selector for messages.

    Raises:
        PluginError: The result is not a selection, lacks a group, has a candidate that does not fit, or
            exceeds the budget.
    """
    if not isinstance(selection, Selection):
        raise PluginError(f"{whose} returns a {type(selection).__name__}, not a Selection")
    for group in problem.groups:
        chosen = selection.choices.get(group.name)
        if chosen not in problem.sizes[group.name]:
            fitting = ", ".join(problem.sizes[group.name])
            raise PluginError(f"{whose} chooses {chosen!r} for '{group.name}', whose candidates are {fitting}")
    most = problem.most_bytes
    if most is not None and problem.bytes_of(selection.choices) > most:
        raise PluginError(f"{whose} chooses {problem.bytes_of(selection.choices):,} bytes, but the budget allows {most:,}")
    return selection
