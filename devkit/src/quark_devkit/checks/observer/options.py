"""Checks of observers: their options, and the specs that they refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quark.errors import ConfigError
from quark.plugins.options import observer_options
from quark_devkit.check import NotApplicableError, check, require
from quark_devkit.checks.observer import accepted_examples, data_of, examples_of, observed, same_range
from quark_devkit.example_specs import odd_specs, registered_formats
from quark_devkit.option_effects import digest, require_effects
from quark_devkit.subject import Subject


@check("observer")
def refuses_unknown_options(subject: Subject) -> None:
    """An observer option that it does not have is refused by ``spec_error``."""
    observer = subject.catalog.observers.load_observer(subject.lookup_name)
    for example in accepted_examples(subject):
        answer = observer.spec_error(example.spec.set(observer_options={"an_option_that_no_observer_has": 1}))
        require(isinstance(answer, str) and answer, f"accepts the option 'an_option_that_no_observer_has' ({example})")


@check("observer")
def accepts_the_defaults_of_its_options(subject: Subject) -> None:
    """Each option that it lists is accepted with its default, and gives the range that leaving
    it out gives."""
    observer = subject.catalog.observers.load_observer(subject.lookup_name)
    options = observer_options(observer)
    if not options:
        raise NotApplicableError("it lists no options")
    for example in examples_of(subject):
        level = example.quantizer.stored_level
        for option in options:
            spec = level.spec.set(observer_options={option.name: option.default})
            answer = observer.spec_error(spec)
            require(answer is None, f"refuses its own default of the option '{option.name}': {answer} ({example})")
            chosen = observer(spec, level.granularity)
            chosen.observe(data_of())
            require(
                same_range(chosen.range(), observed(example, data_of()).range()),
                f"gives another range with the option '{option.name}' at its default than without it ({example})",
            )


@check("observer", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Another value of each option changes the range of some spec, is refused, or is declared to change cost
    alone."""
    observer = subject.catalog.observers.load_observer(subject.lookup_name)

    def results(values: Mapping[str, Any]) -> Iterator[str]:
        for example in examples_of(subject):
            level = example.quantizer.stored_level
            spec = level.spec.set(observer_options=values)
            if (reason := observer.spec_error(spec)) is not None:
                raise ConfigError(reason)
            chosen = observer(spec, level.granularity)
            chosen.observe(data_of())
            yield digest(*chosen.range())

    require_effects(observer_options(observer), results)


@check("observer")
def answers_odd_specs(subject: Subject) -> None:
    """``spec_error`` gives None or a text for any spec, and raises nothing."""
    observer = subject.catalog.observers.load_observer(subject.lookup_name)
    for spec in odd_specs(registered_formats()):
        answer = observer.spec_error(spec)
        require(answer is None or (isinstance(answer, str) and answer), f"answers {answer!r} where None or a reason is wanted ({spec})")
