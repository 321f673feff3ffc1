"""Checks of transforms: they keep the function of a small model, and work together with other algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

from quark.algorithms import RoundToNearest, Validation
from quark.calibration.plugin_checks import refuse_strange
from quark.config.algorithm import AlgoConfig
from quark.errors import ConfigError
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.plugins import AlgorithmRecord
from quark.plugins.attribution import origin
from quark.runs.selected_algorithms import in_order
from quark_devkit.algorithm_runs import HARM, logit_error, others, processor_of, run_with, schemes_for, settings_of, valid_settings
from quark_devkit.check import NotApplicableError, assume, check, complaining, require
from quark_devkit.checks import algorithm
from quark_devkit.option_effects import digest
from quark_devkit.random_states import random_states_kept
from quark_devkit.small_models import logits, quantized, run_config, small_family, with_cache
from quark_devkit.subject import Subject
from quark_devkit.transformed_models import changed_parts, different_parameters, distance, float64_logits, named_parts, transformed
from quark_devkit.whole_runs import (
    every_validation,
    readable_layout,
    require_reload,
    require_same_after_resume,
    require_same_by_two_ranks,
    require_same_from_disk,
)

TOLERANCE = 1e-9
"""Far above float64 rounding in two blocks, far below the effect of a scale."""


def _keeps_function(
    scheme: str, *settings: AlgoConfig, exclude: tuple[str, ...] = (), is_fused: bool = False, has_dead_channels: bool = False
) -> None:
    result = transformed(scheme, *settings, exclude=exclude, is_fused=is_fused, has_dead_channels=has_dead_channels)
    error = distance(float64_logits(result.model), float64_logits(result.before))
    names = " and ".join(f"'{one.name}'" for one in settings[1:])
    also = f", together with {names}" if names else ", with layers excluded" if exclude else ", with fused projections" if is_fused else ""
    also = ", with channels that are always 0" if has_dead_channels else also
    require(error < TOLERANCE, f"changes the model's logits by {error:.2g} of the largest one, in float64{also} ({scheme})")


@check("transform")
def is_made_of_its_settings(subject: Subject) -> None:
    """The processor, called with settings, returns a `quark.algorithms.Transform`, whose ``needs`` are
    statistics.
    """
    refuse_strange(processor_of(subject), "transform", origin("algorithms", subject.lookup_name))


@check("transform", level="advisory", since=2)
def declares_calibration(subject: Subject) -> None:
    """A transform that needs statistics declares the capability ``calibration`` for listings."""
    algorithm.calibration_is_declared(subject)


checks_of_settings = tuple(map(check("transform"), algorithm.OF_SETTINGS))


@check("transform", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Different values of an option give different transformed models, whatever the boolean options are. A
    value may be refused instead, and an option may be declared to change only the cost."""

    def results(settings: AlgoConfig) -> Iterator[object]:
        for scheme in schemes_for(subject):
            model = transformed(scheme, settings).model
            yield digest(named_parts(model), *model.state_dict().values())
        transform, worse = processor_of(subject, settings), Validation(1.0, 2.0, 0.1, 10, is_held_out=True)
        yield transform.is_validated and transform.accepts(worse)
        yield digest(logits(quantized(with_cache(run_config(schemes_for(subject)[0], settings)))))

    algorithm.options_have_effects(subject, results)


statistics_are_sums_over_tokens = check("transform", since=2)(algorithm.statistics_are_sums_over_tokens)


@check("transform")
def has_a_place_among_the_others(subject: Subject) -> None:
    """``role``, ``before`` and ``after`` of the record define an order with each other registered transform,
    and with all compatible transforms together.
    """
    record: AlgorithmRecord = subject.record
    together = {record.name: record}
    for other, _ in others(subject, "transform"):
        with complaining(f"cannot be ordered in a run with '{other.name}'", ConfigError):
            in_order({record.name: record, other.name: other})
        together.setdefault(other.role or other.name, other)
    in_order({each.name: each for each in together.values()})


@check("transform", level="advisory")
def changes_something(subject: Subject) -> None:
    """For at least one scheme, the transform changes parameters of the small model, which has channels with
    large activations.
    """
    schemes = schemes_for(subject)
    changed = any(transformed(scheme, valid_settings(subject)).changed for scheme in schemes)
    require(changed, f"changes no parameter for {' and '.join(schemes)}, so the other checks show little")


@check("transform")
def keeps_the_function(subject: Subject) -> None:
    """In float64, the changed model gives the same logits up to rounding. This includes models with fused
    q/k/v and gate/up projections and with biases.
    """
    for scheme in schemes_for(subject):
        _keeps_function(scheme, valid_settings(subject))
    with suppress(NotApplicableError):  # it may refuse a family
        fused = valid_settings(subject, is_fused=True)
        for scheme in schemes_for(subject):
            _keeps_function(scheme, fused, is_fused=True)


@check("transform")
def keeps_the_function_with_layers_excluded(subject: Subject) -> None:
    """The transform also keeps the function if some layers of each block stay float."""
    for exclude in (("*.q_proj",), ("*.o_proj", "*.down_proj"), ("*.layers.0.*",)):
        _keeps_function(schemes_for(subject)[0], valid_settings(subject), exclude=exclude)


@check("transform", since=2)
def keeps_the_function_with_dead_channels(subject: Subject) -> None:
    """The transform also keeps the function if some channels of the MLP and of the values are always 0."""
    for scheme in schemes_for(subject):
        _keeps_function(scheme, valid_settings(subject), has_dead_channels=True)


@check("transform", since=2)
def reports_what_it_applied(subject: Subject) -> None:
    """A block that the transform reports as changed has changed parameters, whether validation finds an
    improvement or not. For other blocks, the transform reports ``applied: False``. A run removes a transform
    without any effect from the configuration."""
    for scheme, is_improvement in product(schemes_for(subject), (True, False)):
        with every_validation(is_improvement=is_improvement):
            result = transformed(scheme, valid_settings(subject))
        if any(one.runs_with_model() for one in result.settings):
            continue  # its modules may act without a change of parameters
        for block in decoder_blocks(result.model, small_family()):
            is_changed = any(name.startswith(f"{block.name}.") for name in result.changed)
            says = result.report.transformed.get(block.name, {}).get("applied", True)
            require(is_changed or not says, f"reports '{block.name}' as changed, but did not change it: report applied: False")


@check("transform")
def leaves_nothing_behind(subject: Subject) -> None:
    """The transform adds and removes no module, parameter, buffer or hook of the model, unless its restorer
    adds the same to a loaded model.
    """
    for scheme in schemes_for(subject):
        result = transformed(scheme, valid_settings(subject))
        runs = any(one.name == settings_of(subject).name and one.runs_with_model() for one in result.settings)
        if runs:
            has_restorer = subject.record.restorer is not None
            require(has_restorer, "has settings with runs_with_model(), but its record has no restorer")
            continue
        changes = changed_parts(result.before, result.model)
        require(not changes, f"{changes[0] if changes else ''}, but its settings do not set runs_with_model()")


@check("transform")
def is_deterministic(subject: Subject) -> None:
    """Two runs give the same parameters, to the bit, and do not change random states of the process."""
    scheme = schemes_for(subject)[0]
    with random_states_kept():
        first, second = (transformed(scheme, valid_settings(subject)).model for _ in range(2))
    different = different_parameters(first, second)
    require(not different, f"gives '{different[0] if different else ''}' other values in a second run")


@check("transform")
def composes_with_other_transforms(subject: Subject) -> None:
    """Together with each registered transform of another role, the transform keeps the function. The order in
    which a configuration names the two does not matter."""
    scheme = schemes_for(subject)[-1]
    for _, other in others(subject, "transform"):
        _keeps_function(scheme, valid_settings(subject), other)
        own = valid_settings(subject)
        one, reverse = (transformed(scheme, *pair).model for pair in ((own, other), (other, own)))
        order = "its record sets the order with before= or after="
        is_same = not different_parameters(one, reverse)
        require(is_same, f"gives a different model when a configuration names it after '{other.name}' instead of before it: {order}")


@check("transform")
def composes_with_roundings(subject: Subject) -> None:
    """A run with the transform and any registered rounding finishes. The error of the logits is at most 1.5
    times the error of round-to-nearest alone.
    """
    scheme = schemes_for(subject)[0]
    nearest = logit_error(scheme)
    for record, rounding in others(subject, "rounding"):
        ratio = logit_error(scheme, valid_settings(subject), rounding) / nearest
        require(ratio <= HARM, f"makes the logit error {ratio:.3g} times as large, with the rounding '{record.name}', as round-to-nearest")


does_no_harm = check("transform")(algorithm.does_no_harm)


works_on_an_accelerator = check("transform", level="advisory")(algorithm.works_on_an_accelerator)


@check("transform")
def reloads_to_the_same_logits(subject: Subject) -> None:
    """A model that is quantized with the transform has the same logits, to the bit, after export and loading,
    also if modules of the transform run with the model.
    """
    for scheme in schemes_for(subject):
        require_reload(quantized(run_config(scheme, valid_settings(subject))), readable_layout())


@check("transform")
def streams_to_the_same_bytes(subject: Subject) -> None:
    """A checkpoint that is quantized from disk equals one that is quantized in memory, byte for byte. If the
    transform sets ``works_by_block``, the run from disk works block by block.
    """
    require_same_from_disk(run_config(schemes_for(subject)[-1], valid_settings(subject)))


is_copied_and_pickled = check("transform", since=2)(algorithm.is_copied_and_pickled)


@check("transform")
def resumes_to_the_same_bytes(subject: Subject) -> None:
    """A run that fails between two blocks and is resumed writes the same bytes as a complete run.

    Finished blocks do not run again. A transform therefore saves its state between blocks with `learned()`
    and restores the state with `recall()`.
    """
    assume(
        processor_of(subject).works_by_block,
        "it changes the whole model before a block is written, so a resumed run starts from the beginning",
    )
    require_same_after_resume(run_with(subject))


@check("transform")
def is_the_same_on_two_ranks(subject: Subject) -> None:
    """Two processes that share a deterministic run, each with half of the data, give the same weights as one
    process, to the bit.
    """
    require_same_by_two_ranks(run_config(schemes_for(subject)[-1], valid_settings(subject)))


@check("transform")
def its_rounding_is_one(subject: Subject) -> None:
    """``rounding()`` returns None or a `quark.algorithms.Rounding`. This rounding runs if the user names no
    rounding."""
    rounding = processor_of(subject).rounding()
    assume(not (rounding is None or isinstance(rounding, RoundToNearest)), "it works with round-to-nearest")
    refuse_strange(rounding, "rounding", origin("algorithms", subject.lookup_name))
