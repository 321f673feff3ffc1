"""Checks of distributions pass a healthy one, say why they are skipped, and run nothing of a denied
plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from quark.plugins import Catalog, SchemeRecord
from quark.plugins.discovery import Settings, discover
from quark_devkit import Check, Result, find_subject, run_check, run_checks
from quark_devkit.catalogue import checks_of

from .distribution_mutants import LISTENER, above, installed
from .mutant import DISTRIBUTION, subject_among

pytestmark = pytest.mark.thorough

CHECKS = checks_of("distribution")
by_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
CONFIG = "quark_schemes.schemes:int4_wo_64"
SCHEME = SchemeRecord(name="mutant_plain", summary="a scheme", config=CONFIG)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Results of the checks of a healthy distribution, which is installed while they run."""
    with installed(tmp_path_factory.mktemp("healthy"), LISTENER) as subject:
        return {result.check.name: result for result in run_checks(subject, CHECKS)}


@by_check
def test_a_check_passes_what_new_plugin_writes(check: Check, healthy: dict[str, Result]) -> None:
    assert (healthy[check.name].outcome, healthy[check.name].message) == ("passed", "")


@by_check
def test_a_plugin_that_a_program_adds_passes_or_is_told_what_cannot_be_looked_at(check: Check) -> None:
    result = run_check(subject_among("distribution", [SCHEME]), check)
    assert result.outcome in ("passed", "not applicable"), result.message
    assert bool(result.message) == (result.outcome == "not applicable")


@by_check
def test_nothing_of_a_denied_distribution_is_run(check: Check, tmp_path: Path) -> None:
    trace = tmp_path / "was-run"
    with installed(tmp_path, above(f"open({str(trace)!r}, 'w').close()")) as subject:
        trace.unlink()  # registering it left that
        catalog = Catalog(discover(), Settings(disabled=frozenset({DISTRIBUTION})))
        denied = attrs.evolve(find_subject(catalog, "distribution", DISTRIBUTION), source_directory=subject.source_directory)
        result = run_check(denied, check)
    assert not trace.exists()
    others = {"is_found_by_an_entry_point": "failed", "requires_the_core_within_bounds": "passed"}  # the second reads metadata only
    others["can_be_checked"] = "passed"  # by these two
    assert result.outcome == others.get(check.name, "not applicable")


def report_of(directory: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and JSON report of ``quark check`` in a fresh process, for a ``directory``."""
    path = os.pathsep.join([str(directory / "site"), str(directory / "source" / "src"), *sys.path])
    command = [sys.executable, "-c", "from quark_workbench.cli.main import main; main()", "check", DISTRIBUTION, "--json", *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **environment, "PYTHONPATH": path}, cwd=directory
    )
    return done.returncode, json.loads(done.stdout)


def test_a_distribution_that_cannot_be_imported_gets_its_report(tmp_path: Path) -> None:
    with installed(tmp_path, above("import a_module_that_nobody_has")):
        pass
    code, report = report_of(tmp_path)
    outcomes = {result["check"]: result for result in report["results"]}
    assert code == 1
    assert set(outcomes) == {check.name for check in CHECKS}
    assert outcomes["is_found_by_an_entry_point"]["outcome"] == "failed"
    assert "No module named 'a_module_that_nobody_has'" in outcomes["is_found_by_an_entry_point"]["message"]
    others = {name for name, result in outcomes.items() if result["outcome"] == "not applicable"}
    assert {"registers_without_torch", "points_at_what_there_is", "describes_every_record"} <= others, "nothing passes unseen"
    assert not any(result["details"] for result in report["results"]), "no check of it ends in a traceback"
