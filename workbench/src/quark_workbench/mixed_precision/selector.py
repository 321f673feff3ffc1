"""SchemeSelector: the protocol of what chooses a scheme for each group of layers; third parties implement it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from quark.errors import ConfigError, PluginError
from quark.plugins import selectors
from quark.plugins.attribution import attributed, origin
from quark.plugins.options import called, checked
from quark_workbench.mixed_precision.problem import SelectionProblem
from quark_workbench.mixed_precision.selection import Selection

__all__ = ["SchemeSelector", "checked_selection", "selector_of"]


@runtime_checkable
class SchemeSelector(Protocol):
    """Chooses a scheme for each group of layers.

    A class that can be called without arguments; keyword arguments are its options.
    """

    def select(self, problem: SelectionProblem) -> Selection:
        """Return one candidate for each group, among those that ``problem.sizes`` has for it, within the budget.

        The model is left as it was. The same problem gives the same choice.

        Raises:
            ConfigError: No choice meets the budget.
        """


def selector_of(name: str | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, SchemeSelector]:
    """Return the name of a registered selector, and the selector, made with options.

    Args:
        name: Of the selector; None takes the one that is installed.
        options: Of the selector, by name.

    Raises:
        ConfigError: No selector is installed, several are and none is named, or it has no such option.
        UnknownNameError: There is none of that name.
        PluginError: The selector cannot be made, or has no method ``select``.
    """
    names = selectors().names()
    if name is None:
        if len(names) != 1:
            said = f"there are {', '.join(names)}: name one" if names else f"none is installed. {_missing()}"
            raise ConfigError(f"a selector chooses the scheme of each layer, and {said}")
        name = names[0]
    make = selectors().load_selector(name)
    given = checked(f"the selector '{name}'", selectors().options(name), options or {})
    whose = origin("selectors", name)
    with attributed("being made of its options", whose):
        selector = called(f"the selector '{name}'", make, given)
    if not isinstance(selector, SchemeSelector):
        raise whose.error(f"makes a {type(selector).__name__}, which has no method select(problem)")
    return selectors().get(name).name, selector


def _missing() -> str:
    return f"The built-in one comes with {selectors().kind.distribution}: pip install {selectors().kind.distribution}"


def checked_selection(problem: SelectionProblem, selection: object, whose: str) -> Selection:
    """Return what a selector returned, checked for what a configuration is built on.

    Args:
        problem: What it was asked.
        selection: What it returned.
        whose: How messages call it.

    Raises:
        PluginError: It is no selection; it has no choice for a group, or one that does not fit; or it exceeds
            the budget.
    """
    if not isinstance(selection, Selection):
        raise PluginError(f"{whose} returns a {type(selection).__name__} where a Selection is wanted")
    for group in problem.groups:
        chosen = selection.choices.get(group.name)
        if chosen not in problem.sizes[group.name]:
            fitting = ", ".join(problem.sizes[group.name])
            raise PluginError(f"{whose} chooses {chosen!r} for '{group.name}', for which there are {fitting}")
    most = problem.most_bytes
    if most is not None and problem.bytes_of(selection.choices) > most:
        raise PluginError(f"{whose} chooses {problem.bytes_of(selection.choices):,} bytes, and the budget leaves {most:,}")
    return selection
