"""Checks of observers: their options, and the specs that they refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quark.errors import ConfigError
from quark.plugins.options import observer_options
from quark_devkit.check import assume, check, require
from quark_devkit.checks.observer import Range, accepted_examples, data_of, examples_of, range_of, same_range
from quark_devkit.example_specs import Example, odd_specs, registered_formats
from quark_devkit.option_effects import digest, require_effects
from quark_devkit.subject import Subject


def _range_with(observer: Any, example: Example, options: Mapping[str, Any]) -> Range:
    """Return the range that an observer of a class gives with some values of options.

    Raises:
        ConfigError: It refuses them.
    """
    level = example.quantizer.stored_level
    spec = level.spec.set(observer_options=options)
    if (reason := observer.spec_error(spec)) is not None:
        raise ConfigError(reason)
    chosen = observer(spec, level.granularity)
    chosen.observe(data_of())
    low, high = chosen.range()
    return low, high


@check("observer")
def refuses_unknown_options(subject: Subject) -> None:
    """An observer option that it does not have is refused by ``spec_error``."""
    observer = subject.load("observer")
    for example in accepted_examples(subject):
        answer = observer.spec_error(example.spec.set(observer_options={"an_option_that_no_observer_has": 1}))
        require(isinstance(answer, str) and answer, f"accepts the option 'an_option_that_no_observer_has' ({example})")


@check("observer")
def accepts_the_defaults_of_its_options(subject: Subject) -> None:
    """Each option that it lists is accepted with its default, and gives the range that leaving
    it out gives."""
    observer = subject.load("observer")
    options = observer_options(observer)
    assume(options, "it lists no options")
    for example in examples_of(subject):
        for option in options:
            try:
                chosen = _range_with(observer, example, {option.name: option.default})
            except ConfigError as error:
                require(False, f"refuses its own default of the option '{option.name}': {error} ({example})")
            is_same = same_range(chosen, range_of(example, data_of()))
            require(is_same, f"gives another range with the option '{option.name}' at its default than without it ({example})")


@check("observer", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Another value of each option changes the range of some spec, is refused, or is declared to change cost
    alone."""
    observer = subject.load("observer")

    def results(values: Mapping[str, Any]) -> Iterator[str]:
        for example in examples_of(subject):
            yield digest(*_range_with(observer, example, values))

    require_effects(observer_options(observer), results)


@check("observer")
def answers_odd_specs(subject: Subject) -> None:
    """``spec_error`` gives None or a text for any spec, and raises nothing."""
    observer = subject.load("observer")
    for spec in odd_specs(registered_formats()):
        answer = observer.spec_error(spec)
        require(answer is None or (isinstance(answer, str) and answer), f"answers {answer!r} where None or a reason is wanted ({spec})")
