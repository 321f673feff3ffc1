"""An algorithm is checked beside those that a plan allows: what one excludes is no failure of another."""

from __future__ import annotations

from typing import Annotated

import attrs
import pytest

from quark.plugins import AlgorithmRecord, OptionNote
from quark.plugins.catalog import using
from quark_devkit.algorithm_runs import others, settings_of, valid_settings
from quark_devkit.catalogue import checks_of
from quark_devkit.extent import thoroughly
from quark_devkit.runner import run_check
from quark_devkit.small_models import coarse_scheme

from .mutants.block_tuning_mutants import Nudges, Settings, record_of
from .mutants.branch_mutants import HEALTHY
from .mutants.mutant import subject_among
from .mutants.rounding_mutants import HEALTHY as ROUNDINGS


@pytest.mark.parametrize("is_excluded", [False, True])
def test_a_rounding_that_excludes_the_scheme_is_none_of_the_others(is_excluded: bool) -> None:
    healthy: AlgorithmRecord = ROUNDINGS[0]
    excluded = {coarse_scheme(): "its codes are shared"} if is_excluded else {}
    record = AlgorithmRecord(
        name=healthy.name, kind="rounding", config=healthy.config, processor=healthy.processor, excluded_schemes=excluded
    )
    subject = subject_among("branch", (*HEALTHY, record))
    with using(subject.catalog):
        names = {other.name for other, _ in others(subject, "rounding")}
    assert (record.name in names) != is_excluded


@attrs.define(kw_only=True)
class OfManySteps(Settings):
    """Settings of a tuning that takes many steps.

    Attributes:
        iters: Steps for each block.
    """

    iters: Annotated[int, OptionNote(in_checks=5)] = 200


class StepsByCount(Nudges):
    """A tuning whose result depends on the number of steps."""

    def __init__(self, settings: OfManySteps) -> None:
        super().__init__(settings)
        self.step = settings.iters / 4000


@pytest.mark.parametrize("is_thorough", [False, True])
def test_a_fresh_process_takes_as_many_steps(is_thorough: bool) -> None:
    subject = subject_among("block_tuning", (record_of(StepsByCount, OfManySteps),))
    check = next(check for check in checks_of("block_tuning") if check.name == "does_the_same_in_a_fresh_process")
    with thoroughly(is_thorough):
        result = run_check(subject, check)
    assert result.outcome == "passed", result.message


@pytest.mark.parametrize("is_thorough", [False, True])
def test_runs_in_checks_take_the_steps_that_an_option_names_for_checks(is_thorough: bool) -> None:
    subject = subject_among("block_tuning", (record_of(config=OfManySteps),))
    with using(subject.catalog), thoroughly(is_thorough):
        assert settings_of(subject).iters == 200  # type: ignore[attr-defined]
        assert valid_settings(subject).iters == (200 if is_thorough else 5)  # type: ignore[attr-defined]
