"""An algorithm is checked beside those that a plan allows: what one excludes is no failure of another."""

from __future__ import annotations

import pytest

from quark.plugins import AlgorithmRecord
from quark.plugins.catalog import using
from quark_devkit.algorithm_runs import others
from quark_devkit.small_models import coarse_scheme

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
