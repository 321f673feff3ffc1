"""Checks of the settings of every algorithm: a rounding, a transform or a tuning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from quark.config.algorithm import AlgoConfig
from quark.config.templates.algorithms import algo_config_from_dict, derived_config, with_options
from quark.errors import QuarkError
from quark.plugins import algorithms
from quark.plugins.options import Option
from quark_devkit.check import Check, CheckFailedError, NotApplicableError, check, require
from quark_devkit.option_effects import require_effects
from quark_devkit.small_models import small_family
from quark_devkit.subject import Subject

__all__ = [
    "calibration_is_declared",
    "checks_of_kind",
    "options_have_effects",
    "processor_of",
    "settings_of",
]

UNKNOWN = "a_setting_that_no_algorithm_has"


def settings_of(subject: Subject, *, is_fused: bool = False) -> AlgoConfig:
    """Return the settings that the algorithm derives for the small model's family, or else its defaults.

    Args:
        subject: The algorithm.
        is_fused: Whether the small model with fused projections is meant.

    Raises:
        NotApplicableError: It refuses that family.
        CheckFailedError: It has neither.
    """
    name = subject.lookup_name
    architecture = small_family(is_fused=is_fused)
    if (reason := algorithms().load_config(name).refusal(architecture)) is not None:
        raise NotApplicableError(f"it does not apply to the family of the small model: {reason}")
    settings = derived_config(name, architecture)
    if settings is not None:
        return settings
    try:
        return algorithms().load_config(name)()  # type: ignore[call-arg]
    except TypeError as error:
        raise CheckFailedError(f"has no settings without arguments, and derives none from a family's facts: {error}") from None


def processor_of(subject: Subject, settings: AlgoConfig | None = None) -> Any:
    """Return the object that the subject's processor makes of its settings.

    Raises:
        NotApplicableError: The record brings a configuration only.
    """
    if subject.record.processor is None:  # type: ignore[union-attr]
        raise NotApplicableError("the record brings a configuration only, and no processor")
    return algorithms().load_processor(subject.lookup_name)(settings_of(subject) if settings is None else settings)


def calibration_is_declared(subject: Subject) -> None:
    """Raise where a processor needs statistics and the record does not say ``calibration``."""
    declares = "calibration" in subject.record.capabilities  # type: ignore[union-attr]
    require(declares or not processor_of(subject).needs, "needs statistics, and its record does not declare the capability 'calibration'")


def default_settings_are_valid(subject: Subject) -> None:
    """There are settings without a user's choices, under the record's name; each option accepts its own
    default."""
    settings = settings_of(subject)
    names = (subject.record.name, *subject.record.aliases)  # type: ignore[union-attr]
    require(settings.name in names, f"has settings of the name '{settings.name}', and its record the name '{subject.name}'")
    for option in _options(subject):
        value = getattr(settings, option.name)
        try:
            with_options(subject.name, settings, {option.name: value})
        except QuarkError as error:
            require(False, f"refuses the value that its option '{option.name}' has by default: {error}")


def settings_survive_json(subject: Subject) -> None:
    """Settings, also changed ones, are read back from their JSON form as they were."""
    for settings in (settings_of(subject), *_changed(subject)):
        try:
            text = json.dumps(settings.to_dict())
        except (TypeError, ValueError) as error:
            require(False, f"has settings that are no JSON values: {error}")
        again = algo_config_from_dict({**json.loads(text), "name": subject.lookup_name})
        again.name = settings.name
        require(again == settings, f"reads settings back from JSON as {again}, which were {settings}")


def refuses_unknown_settings(subject: Subject) -> None:
    """Settings with a key that the algorithm does not have are refused."""
    kind = algorithms().load_config(subject.lookup_name)
    data = {**settings_of(subject).to_dict(), UNKNOWN: 1}
    for what, make in (("from_dict", lambda: kind.from_dict(data)), ("its class", lambda: kind(**data))):
        try:
            make()
        except (TypeError, ValueError, QuarkError):
            continue
        require(False, f"takes settings with the key '{UNKNOWN}' by {what}: keys that it does not have are to be refused")


def describes_its_settings(subject: Subject) -> None:
    """Each option has a line of help, which listings show."""
    silent = [option.name for option in _options(subject) if not option.help.strip()]
    require(
        not silent, f"says nothing of the options {', '.join(silent)}: describe them under 'Attributes:' in the docstring of its settings"
    )


def checks_of_kind(kind: str) -> tuple[Check, ...]:
    """Return the checks of settings for one kind of algorithm."""
    functions = (default_settings_are_valid, settings_survive_json, refuses_unknown_settings, describes_its_settings)
    return tuple(check(kind)(function) for function in functions)


def options_have_effects(subject: Subject, results: Callable[[AlgoConfig], Iterable[Any]]) -> None:
    """Raise where another value of an option is accepted and changes none of the results.

    Args:
        subject: The algorithm.
        results: Yields what is made with settings, to be compared with ``==``.
    """
    settings = settings_of(subject)

    def changed(values: Mapping[str, Any]) -> Iterable[Any]:
        return results(with_options(subject.name, settings, values))

    require_effects(_options(subject), changed, {option.name: getattr(settings, option.name) for option in _options(subject)})


def _options(subject: Subject) -> tuple[Option, ...]:
    return algorithms().options(subject.lookup_name)


def _changed(subject: Subject) -> Iterator[AlgoConfig]:
    """Yield settings that differ from the default ones in one option each."""
    settings = settings_of(subject)
    for option in _options(subject):
        value = getattr(settings, option.name)
        others: tuple[Any, ...] = option.note.examples
        if isinstance(value, bool):
            others = (not value,)
        elif isinstance(value, int | float):
            others = (value + 1, value / 2)
        elif isinstance(value, list) and all(isinstance(element, str) for element in value):
            others = ([*value, "x"],)
        for other in others:
            try:
                changed = with_options(subject.name, settings, {option.name: other})
            except (QuarkError, ValueError, TypeError):
                continue
            if getattr(changed, option.name) == other:
                yield changed
                break
