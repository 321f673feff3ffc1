"""A check of schemes tells of an option whose default is another one than its function says."""

from __future__ import annotations

from quark_devkit import run_check
from quark_devkit.checks.scheme.configuration import lists_its_options

from ...mutants.mutant import subject_among
from ...mutants.scheme_mutants import other_default, record_of


def test_lists_its_options_names_an_option_with_another_default() -> None:
    result = run_check(subject_among("scheme", [record_of(other_default)]), lists_its_options)
    assert result.outcome == "failed"
    assert result.message == "builds a different configuration with group_size=32, its default, than without it"
