"""Sound formats of vectors and of tables pass the checks of formats that their mutants fail."""

from __future__ import annotations

from typing import Any

import pytest

from quark_devkit import all_checks, run_check

from .broken_vectors import Learns, Pairs
from .format_mutants import record_of
from .mutant import subject_among

CHECKS = ("rounds_each_vector_by_itself", "rounds_to_the_nearest_vector", "learns_the_same_table", "keeps_nan", "serves_columns")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("value", [Pairs(), Learns()], ids=["pairs", "learns"])
def test_a_sound_format_passes(value: Any, check: str) -> None:
    record = record_of(value, bits=value.bits, capabilities=())
    result = run_check(subject_among("format", (record,)), all_checks()[f"format:{check}"])
    assert result.outcome in ("passed", "not applicable"), result.message
