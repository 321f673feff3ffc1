"""Checks of tunings: tuned blocks can be stored, are no worse than untuned blocks, and do not depend on the
kind of run."""

from __future__ import annotations

from collections.abc import Iterator

from quark.calibration.plugin_checks import refuse_strange
from quark.config.algorithm import AlgoConfig
from quark.errors import ConfigError, QuarkError
from quark.plugins import AlgorithmRecord, algorithms, schemes
from quark.plugins.attribution import origin
from quark.runs.selected_algorithms import in_order
from quark_devkit.algorithm_runs import HARM, logit_error, others, processor_of, schemes_for, valid_settings
from quark_devkit.check import check, complaining, require
from quark_devkit.checks import algorithm
from quark_devkit.option_effects import digest
from quark_devkit.random_states import random_states_kept
from quark_devkit.small_models import batches, coarse_scheme, fitting_schemes, has_vectors, quantized, run_config
from quark_devkit.subject import Subject
from quark_devkit.transformed_models import changed_parts, different_parameters


@check("block_tuning")
def is_made_of_its_settings(subject: Subject) -> None:
    """The processor, called with settings, returns a `quark.algorithms.Tuning`."""
    refuse_strange(processor_of(subject), "block_tuning", origin("algorithms", subject.lookup_name))


checks_of_settings = tuple(map(check("block_tuning"), algorithm.OF_SETTINGS))


@check("block_tuning", level="advisory", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Different values of an option give different tuned models, whatever the boolean options are. A value
    may be refused instead, and an option may be declared to change only the cost."""

    def results(settings: AlgoConfig) -> Iterator[str]:
        yield digest(*quantized(run_config(coarse_scheme(), settings), data=batches(4, 8)).state_dict().values())

    algorithm.options_have_effects(subject, results)


@check("block_tuning")
def has_a_place_among_the_others(subject: Subject) -> None:
    """``role``, ``before`` and ``after`` of the record define an order with every other registered tuning."""
    record: AlgorithmRecord = subject.record
    for other in algorithms():
        if other.kind != "block_tuning" or other.name == record.name or (record.role is not None and other.role == record.role):
            continue
        with complaining(f"cannot be ordered in a run with '{other.name}'", ConfigError):
            in_order({record.name: record, other.name: other})


@check("block_tuning", level="advisory")
def changes_something(subject: Subject) -> None:
    """After round-to-nearest, the tuning changes the small model in at least one scheme and reduces the
    held-out error.
    """
    schemes, settings = schemes_for(subject), valid_settings(subject)
    changed = any(different_parameters(quantized(run_config(scheme, settings)), quantized(run_config(scheme))) for scheme in schemes)
    require(changed, f"changes nothing in {' and '.join(schemes)}, or the run undoes its changes, so the other checks show little")


@check("block_tuning")
def tunes_every_format(subject: Subject) -> None:
    """For each kind of weights, a run with the tuning finishes. The parameters are finite, and the codes and
    scales match the weights. Formats that round vectors are left out, since a plan refuses to tune them.
    """
    for scheme in (name for name in fitting_schemes() if not has_vectors(schemes().load_config(name)())):
        with complaining(f"cannot finish a run in {scheme}", QuarkError):
            quantized(run_config(scheme, valid_settings(subject)), data=batches(2, 16))


@check("block_tuning")
def changes_values_alone(subject: Subject) -> None:
    """The tuning adds and removes no module, parameter, buffer or hook of the model. No parameter changes its
    shape or dtype."""
    scheme = coarse_scheme()
    changes = changed_parts(*(quantized(run_config(scheme, *settings)) for settings in ((), (valid_settings(subject),))))
    require(not changes, f"{changes[0] if changes else ''}, compared with round-to-nearest")


does_no_harm = check("block_tuning")(algorithm.does_no_harm)


@check("block_tuning")
def composes_with_roundings(subject: Subject) -> None:
    """A run with the tuning and any registered rounding finishes. The error of the logits is at most 1.5
    times the error with that rounding alone.
    """
    scheme = coarse_scheme()
    for _, rounding in others(subject, "rounding"):
        ratio = logit_error(scheme, rounding, valid_settings(subject)) / logit_error(scheme, rounding)
        require(ratio <= HARM, f"makes the error of the logits {ratio:.3g} times as large as the rounding '{rounding.name}' alone")


@check("block_tuning")
def is_deterministic(subject: Subject) -> None:
    """Two runs give the same parameters, to the bit, and do not change random states of the process."""
    config = run_config(coarse_scheme(), valid_settings(subject))
    with random_states_kept():
        different = different_parameters(quantized(config), quantized(config))
    require(not different, f"gives '{different[0] if different else ''}' other values in a second run")


works_on_an_accelerator = check("block_tuning", level="advisory")(algorithm.works_on_an_accelerator)
checks_of_runs = tuple(map(check("block_tuning"), algorithm.OF_RUNS))
