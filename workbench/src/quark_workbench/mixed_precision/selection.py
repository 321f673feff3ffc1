"""The protocol of selectors, the result of a selector, and this result together with its configuration."""

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
    """A point of the Pareto curve. Every choice with a smaller loss has more bytes.

    Attributes:
        group_bytes: Bytes of all groups.
        loss: Predicted loss.
        choices: Dictionary from group to candidate.
        measured_kl: Mean KL divergence from the float model on calibration tokens, in nats per token; None if
            it was not measured.
    """

    group_bytes: int
    loss: float
    choices: Choices = attrs.field(repr=False, hash=False)
    measured_kl: float | None = None


@attrs.frozen
class Selection:
    """The result of a selector.

    Attributes:
        choices: Dictionary from group to candidate, for every group of the problem.
        losses: For each group, a dictionary from candidate to predicted loss. It is empty if the selector
            predicts no losses.
        unit: Unit of the losses, such as ``"nats per token"``.
        curve: The Pareto curve in ascending order of bytes. It may be empty.
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
        selection: What the selector returned.
        problem: The problem that the selector solved.
        selector: Name of the selector; None if a selector object was passed.
        seconds: The time that the selection took.
    """

    config: QConfig
    selection: Selection
    problem: SelectionProblem = attrs.field(repr=False)
    selector: str | None = None
    seconds: float = 0.0

    @property
    def group_bytes(self) -> int:
        """The bytes of all groups with their chosen candidates."""
        return self.problem.bytes_of(self.selection.choices)

    @property
    def bits(self) -> float:
        """The stored bits per weight of the groups with their chosen candidates."""
        return self.problem.bits_of(self.group_bytes)

    @property
    def total_bytes(self) -> int:
        """The bytes of all tensors of the checkpoint, with the chosen candidates."""
        return self.group_bytes + self.problem.other_bytes

    @property
    def loss(self) -> float | None:
        """The predicted loss of the choices, or None if the selector predicts no loss."""
        losses = self.selection.losses
        return sum(losses[group][name] for group, name in self.selection.choices.items()) if losses else None

    def to_dict(self) -> dict[str, Any]:
        """Return problem, choices, losses and curve as JSON values, for reports and plots."""
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
    """The protocol of selectors, which choose a scheme for each group of layers.

    A plugin registers a class. Its constructor must work without arguments, and its keyword arguments are the
    options of the selector.
    """

    def select(self, problem: SelectionProblem) -> Selection:
        """Choose a candidate from ``problem.sizes`` for each group, so that the choice meets the budget.

        A selector must not change the model, and must return the same choice for the same problem.

        Raises:
            ConfigError: No choice meets the budget.
        """


def selector_of(name: str | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, SchemeSelector]:
    """Create a registered selector with these options. Return its name and the selector.

    Args:
        name: Name of the selector; None for the only installed selector.
        options: Dictionary from name of option to value.

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
    """Check the result of a selector, and return it.

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
        raise PluginError(f"{whose} chooses schemes of {problem.bytes_of(selection.choices):,} bytes, but the budget allows {most:,}")
    return selection
