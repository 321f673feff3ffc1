"""``quark check DISTRIBUTION``: the conformance suite without pytest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quark_devkit.check import Check
    from quark_devkit.runner import Result
    from quark_devkit.subject import Subject

__all__ = ["check"]


def check(
    distribution: Annotated[str, typer.Argument(help="An installed distribution with quark plugins, such as acme-quant.")],
    kind: Annotated[list[str] | None, typer.Option(help="Check only subjects of this kind; may be repeated.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="Check only the subject of this name; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write the report as JUnit XML to this file.")] = None,
    badge: Annotated[bool, typer.Option("--badge", help="Print one line for a badge.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also print the checks that passed.")] = False,
    pyproject: Annotated[
        Path | None, typer.Option(help="The pyproject.toml with expected failures; by default the distribution's own.")
    ] = None,
    is_quick: Annotated[bool, typer.Option("--quick", help="Run only checks that take a moment, for the first minute of work.")] = False,
    is_all: Annotated[bool, typer.Option("--all", help="Try every case and repetition, slow ones too, before a release.")] = False,
) -> None:
    """Check a distribution against the contracts of quark's plugin API; the exit code is 1 if a
    check fails.
    """
    from quark.errors import ConfigError
    from quark_devkit import report
    from quark_devkit.extent import thoroughly
    from quark_devkit.runner import is_conformant

    if is_quick and (is_all or badge):
        raise ConfigError(
            f"--quick leaves checks out, but {'--all' if is_all else '--badge'} reports on all checks: remove one of the two options"
        )
    with thoroughly(is_all):
        results = _results(
            distribution, kind or [], name or [], pyproject, is_quick=is_quick, show=not as_json and not badge, verbose=verbose
        )
    if junit is not None:
        junit.write_text(report.as_junit(distribution, results), encoding="utf-8", newline="\n")
    if as_json:
        print(json.dumps(report.as_json(distribution, results), indent=2))
    elif badge:
        print(report.badge(distribution, results))
    else:
        print(report.summary(results) + (" (--quick leaves out checks that make whole runs)" if is_quick else ""))
    if not is_conformant(results):
        sys.exit(1)


def _results(
    distribution: str, kinds: list[str], names: list[str], pyproject: Path | None, *, is_quick: bool, show: bool, verbose: bool
) -> list[Result]:
    """Run the checks, and print the lines of each subject immediately."""
    from quark_devkit import report
    from quark_devkit.extent import quick
    from quark_devkit.runner import run_checks

    results: list[Result] = []
    subjects, expected = _selected(distribution, kinds, names, pyproject)
    for subject, checks in subjects:
        own = list(run_checks(subject, quick(checks) if is_quick else checks, expected))
        results += own
        if show:
            print(*report.lines_of(own, verbose=verbose), sep="\n", flush=True)
    return results


def _selected(
    distribution: str, kinds: list[str], names: list[str], pyproject: Path | None
) -> tuple[list[tuple[Subject, tuple[Check, ...]]], dict[str, str]]:
    """Return the subjects with their checks, and the expected failures.

    Raises:
        ConfigError: A kind, a name or an expected failure is unknown, or the distribution registers nothing
            of a given kind.
    """
    from quark.errors import ConfigError
    from quark.plugins.catalog import recorded_catalog  # a plugin that fails gets a report instead of an error, in strict mode too
    from quark_devkit.catalogue import checks_of, subjects_of
    from quark_devkit.expected_failures import find_pyproject

    everything, expected = subjects_of(recorded_catalog(), distribution, kinds, pyproject or find_pyproject(distribution))
    if unknown := [name for name in names if name not in {subject.name for subject in everything}]:
        raise ConfigError(f"{distribution} registers nothing named '{unknown[0]}'{' of that kind' if kinds else ''}")
    chosen = [subject for subject in everything if not names or subject.name in names]
    if not chosen:
        raise ConfigError(f"{distribution} registers nothing of the kind {' or '.join(kinds)}: choose another kind")
    return [(subject, checks_of(subject.kind)) for subject in chosen], expected
