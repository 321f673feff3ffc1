"""Checks of every algorithm (rounding, transform or tuning): the settings, and runs with the algorithm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from quark.config.algorithm import AlgoConfig
from quark.config.templates.algorithms import algo_config_from_dict, with_options
from quark.errors import QuarkError
from quark.plugins.options import Option
from quark_devkit.algorithm_runs import (
    HARM,
    logit_error,
    processor_of,
    require_run_on_accelerator,
    run_with,
    schemes_for,
    settings_of,
    shortened,
    valid_settings,
)
from quark_devkit.check import assume, complaining, raises, require
from quark_devkit.option_effects import REFUSALS, others, require_effects
from quark_devkit.small_models import quantized
from quark_devkit.statistic_laws import require_sum
from quark_devkit.subject import Subject
from quark_devkit.whole_runs import readable_layout, require_copies, require_reload, require_same_after_resume, require_same_from_disk

UNKNOWN = "a_setting_that_no_algorithm_has"


def calibration_is_declared(subject: Subject) -> None:
    """If the processor needs statistics, the record declares the capability ``calibration``."""
    declares = subject.declares("calibration")
    require(declares or not processor_of(subject).needs, "needs statistics, but its record does not declare the capability 'calibration'")


def statistics_are_sums_over_tokens(subject: Subject) -> None:
    """For the same tokens, the statistics have the same count and values, whether the tokens come at once, in
    several unequal batches, or in four parts that are merged in either of two groupings."""
    kinds = processor_of(subject).needs
    assume(kinds, "it needs no statistics")
    for kind in kinds:
        require_sum(kind)


def does_no_harm(subject: Subject) -> None:
    """With the algorithm, the error of the logits is at most 1.5 times the error without it."""
    processor_of(subject)
    settings = settings_of(subject)  # with all its steps: with fewer steps, the quality of the algorithm is another
    for scheme in schemes_for(subject):
        ratio = logit_error(scheme, settings) / logit_error(scheme)
        require(ratio <= HARM, f"makes the error of the logits {ratio:.3g} times as large as without it ({scheme})")


def default_settings_are_valid(subject: Subject) -> None:
    """The default settings have the record's name, and each option accepts its default."""
    settings = settings_of(subject)
    names = (subject.record.name, *subject.record.aliases)
    require(settings.name in names, f"has settings named '{settings.name}', but its record is named '{subject.name}'")
    for option in _options(subject):
        value = getattr(settings, option.name)
        with complaining(f"refuses the default of its option '{option.name}'", QuarkError):
            with_options(subject.name, settings, {option.name: value})


def settings_survive_json(subject: Subject) -> None:
    """Settings, default or changed, are equal after they are written to JSON and read back."""
    for settings in (settings_of(subject), *_changed(subject)):
        with complaining("has settings that JSON cannot store", TypeError, ValueError):
            text = json.dumps(settings.to_dict())
        again = algo_config_from_dict({**json.loads(text), "name": subject.lookup_name})
        again.name = settings.name
        require(again == settings, f"reads settings back from JSON as {again}, not {settings}")


def refuses_unknown_settings(subject: Subject) -> None:
    """Settings with an unknown key are refused."""
    kind = subject.load("config")
    data = {**settings_of(subject).to_dict(), UNKNOWN: 1}
    for what, is_refused in (("from_dict", raises(REFUSALS, kind.from_dict, data)), ("its class", raises(REFUSALS, kind, **data))):
        require(is_refused, f"accepts settings with the key '{UNKNOWN}' in {what}: refuse unknown keys")


def describes_its_settings(subject: Subject) -> None:
    """Each option has a help text for listings."""
    silent = [option.name for option in _options(subject) if not option.help.strip()]
    fix = "describe them under 'Attributes:' in the docstring of its settings"
    require(not silent, f"has no help text for the options {', '.join(silent)}: {fix}")


def works_on_an_accelerator(subject: Subject) -> None:
    """A run on a (simulated) accelerator finishes, keeps all tensors on the accelerator, and is as accurate
    as a run on a CPU.
    """
    for scheme in schemes_for(subject):
        require_run_on_accelerator(scheme, valid_settings(subject))


def reloads_to_the_same_logits(subject: Subject) -> None:
    """A model that the algorithm has quantized has the same logits, to the bit, after export and loading."""
    require_reload(quantized(run_with(subject)), readable_layout())


def streams_to_the_same_bytes(subject: Subject) -> None:
    """A checkpoint that is quantized from disk, with one block in memory at a time, equals a checkpoint that
    is quantized in memory, byte for byte.
    """
    require_same_from_disk(run_with(subject))


def resumes_to_the_same_bytes(subject: Subject) -> None:
    """If a run from disk is interrupted after a block and then resumed, it writes the same bytes as an
    uninterrupted run.
    """
    require_same_after_resume(run_with(subject))


def is_copied_and_pickled(subject: Subject) -> None:
    """A model that the algorithm has quantized can be copied deeply, and pickled for another process, with
    the same logits."""
    require_copies(quantized(run_with(subject)))


OF_SETTINGS = (default_settings_are_valid, settings_survive_json, refuses_unknown_settings, describes_its_settings)
"""Requirements on the settings of every kind of algorithm."""
OF_RUNS = (reloads_to_the_same_logits, streams_to_the_same_bytes, resumes_to_the_same_bytes, is_copied_and_pickled)
"""Requirements on whole runs, for the kinds of algorithms that work block by block."""


def options_have_effects(subject: Subject, results: Callable[[AlgoConfig], Iterable[Any]]) -> None:
    """Raise CheckFailedError if an option accepts a value other than the default and the value changes no
    result.

    Args:
        subject: The algorithm.
        results: Yields the results for some settings. Results are compared with ``==``.
    """
    settings = shortened(subject, settings_of(subject))

    def changed(values: Mapping[str, Any]) -> Iterable[Any]:
        return results(with_options(subject.name, settings, values))

    require_effects(_options(subject), changed, {option.name: getattr(settings, option.name) for option in _options(subject)})


def _options(subject: Subject) -> tuple[Option, ...]:
    return subject.registry.options(subject.lookup_name)


def _changed(subject: Subject) -> Iterator[AlgoConfig]:
    """Yield settings. Each of them differs from the defaults in exactly one option."""
    settings = settings_of(subject)
    for option in _options(subject):
        for other in others(option, getattr(settings, option.name)):
            try:
                changed = with_options(subject.name, settings, {option.name: other})
            except REFUSALS:
                continue
            if getattr(changed, option.name) == other:
                yield changed
                break
