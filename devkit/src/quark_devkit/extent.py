"""How much the checks do: quick checks for the first minute of work, the default, or thorough checks before a
release."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from quark_devkit.check import Check

__all__ = ["LAWS", "OF_DISTRIBUTIONS", "SLOW", "WHOLE_RUNS", "is_thorough", "quick", "thoroughly"]

WHOLE_RUNS = frozenset(
    {
        "composes_with_other_transforms",
        "composes_with_roundings",
        "dequantizes_what_it_wrote",
        "every_algorithm_runs",
        "gives_the_same_each_time",
        "honours_or_refuses_common_options",
        "is_copied_and_pickled",
        "is_inspected",
        "is_the_same_on_two_ranks",
        "keeps_settings_of_single_layers",
        "keeps_what_runs_with_the_model",
        "keeps_codes_and_rounds_scales",
        "quantizes_and_reloads",
        "reads_a_model_that_is_copied",
        "reads_packed_codes_in_any_order",
        "reads_the_files_that_are_there",
        "reads_without_side_effects",
        "reloads_to_the_same_logits",
        "resumes",
        "resumes_to_the_same_bytes",
        "runs_from_codes",
        "stores_layers_of_odd_sizes",
        "stores_or_refuses_every_scheme",
        "streams_to_the_same_bytes",
        "tunes_every_format",
        "works_on_an_accelerator",
        "writes_the_same_from_disk",
    }
)
"""Names of the checks that take the most time."""
LAWS = frozenset(
    {
        "does_the_same_again",
        "does_the_same_in_a_fresh_process",
        "does_the_same_in_any_default_dtype",
        "does_the_same_on_any_number_of_threads",
        "keeps_nothing_alive",
        "leaves_the_process_as_it_was",
        "prints_nothing",
    }
)
"""Names of the checks of `quark_devkit.laws`, which share a fresh process."""
OF_DISTRIBUTIONS = frozenset(
    {
        "builds_a_wheel",
        "changes_nothing_when_it_is_imported",
        "has_a_typed_wheel",
        "has_a_wheel_with_all_that_records_point_at",
        "imports_to_the_same_tensors",
        "is_rounded_by_every_algorithm",
        "registers_the_same_once_it_is_installed",
    }
)
"""Names of the checks of a distribution that build a wheel, install it or start processes."""
SLOW = 1.0
"""CPU seconds of a subject's work above which checks repeat it in fewer cases."""
_IS_THOROUGH = ContextVar("is_thorough", default=False)


def quick(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Return the checks that take only a moment, since they make no whole run and start no process."""
    return tuple(check for check in checks if check.name not in WHOLE_RUNS | LAWS | OF_DISTRIBUTIONS)


def is_thorough() -> bool:
    """Return whether checks try every case and repetition, even if the work takes seconds."""
    return _IS_THOROUGH.get()


@contextmanager
def thoroughly(is_thorough: bool = True, /) -> Iterator[None]:
    """Make checks in the body of the ``with`` statement try every case and repetition, as before a
    release."""
    token = _IS_THOROUGH.set(is_thorough)
    try:
        yield
    finally:
        _IS_THOROUGH.reset(token)
