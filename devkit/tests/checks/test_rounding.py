"""A check of roundings tells of a statistic that is used and not declared."""

from __future__ import annotations

from quark_devkit import run_check
from quark_devkit.checks.rounding import uses_declared_statistics_alone

from ..mutants.broken_roundings import Undeclared
from ..mutants.mutant import subject_among
from ..mutants.rounding_mutants import record_of


def test_uses_declared_statistics_alone_names_a_statistic_that_is_not_declared() -> None:
    result = run_check(subject_among("rounding", [record_of(Undeclared)]), uses_declared_statistics_alone)
    assert result.outcome == "failed"
    assert "AbsMax" in result.message
    assert "add it to needs" in result.message
