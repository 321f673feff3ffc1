"""``quark check DISTRIBUTION``: the conformance suite without pytest."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import typer

    from quark.plugins.catalog import Catalog
    from quark.testing.check import Check
    from quark.testing.runner import Result
    from quark.testing.subject import Subject

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    import typer

    distribution_argument = typer.Argument(..., help="An installed distribution with quark plugins, such as acme-quant.")
    kind_option = typer.Option(None, "--kind", help="Only subjects of this kind; can be repeated.")
    name_option = typer.Option(None, "--name", help="Only the subject of this name; can be repeated.")
    json_option = typer.Option(False, "--json", help="Print the report as JSON.")
    junit_option = typer.Option(None, "--junit", help="Write the report as JUnit XML to this file.")
    badge_option = typer.Option(False, "--badge", help="Print one line for a badge.")
    verbose_option = typer.Option(False, "--verbose", "-v", help="Print checks that passed too.")
    pyproject_option = typer.Option(None, "--pyproject", help="File with the expected failures; by default the distribution's own.")

    @app.command("check")
    def check(
        distribution: str = distribution_argument,
        kind: list[str] = kind_option,
        name: list[str] = name_option,
        as_json: bool = json_option,
        junit: Path = junit_option,
        badge: bool = badge_option,
        verbose: bool = verbose_option,
        pyproject: Path = pyproject_option,
    ) -> None:
        """Check that what a distribution registers keeps the contracts of quark's plugin API; exit code 1 where it does not."""
        from quark.testing import report

        results = _results(distribution, kind or [], name or [], pyproject, show=not as_json and not badge, verbose=verbose)
        if junit is not None:
            junit.write_text(report.as_junit(distribution, results), encoding="utf-8")
        if as_json:
            print(json.dumps(report.as_json(distribution, results), indent=2))
        elif badge:
            print(report.badge(distribution, results))
        else:
            print(report.summary(results))
        from quark.testing.runner import is_conformant

        if not is_conformant(results):
            sys.exit(1)


def _results(distribution: str, kinds: list[str], names: list[str], pyproject: Path | None, *, show: bool, verbose: bool) -> list[Result]:
    """Run the checks, and print each subject's lines as soon as it is done."""
    from quark.testing import report
    from quark.testing.runner import run_checks

    results: list[Result] = []
    subjects, expected = _selected(distribution, kinds, names, pyproject)
    for subject, checks in subjects:
        own = list(run_checks(subject, checks, expected))
        results += own
        if show:
            print(*report.lines_of(own, verbose=verbose), sep="\n", flush=True)
    return results


def _selected(
    distribution: str, kinds: list[str], names: list[str], pyproject: Path | None
) -> tuple[list[tuple[Subject, tuple[Check, ...]]], dict[str, str]]:
    """Return the subjects with their checks, and the expected failures.

    Raises:
        ConfigError: A kind, a name or an expected failure is none; or the distribution registers nothing of that kind.
    """
    from quark.errors import ConfigError
    from quark.testing.catalogue import checks_of
    from quark.testing.expected_failures import expected_failures, find_pyproject, refuse_unknown
    from quark.testing.subject import KINDS, subjects

    file = pyproject or find_pyproject(distribution)
    expected = expected_failures(file)
    everything = list(subjects(_catalog(), distribution, kinds or KINDS, None if file is None else file.parent))
    if not kinds:
        refuse_unknown(expected, (f"{subject.id}:{check.name}" for subject in everything for check in checks_of(subject.kind)))
    if unknown := [name for name in names if name not in {subject.name for subject in everything}]:
        raise ConfigError(f"{distribution} registers nothing of the name '{unknown[0]}'{' and that kind' if kinds else ''}")
    chosen = [subject for subject in everything if not names or subject.name in names]
    if not chosen:
        raise ConfigError(f"{distribution} registers nothing of the kind {' or '.join(kinds)}: there is nothing to check")
    return [(subject, checks_of(subject.kind)) for subject in chosen], expected


def _catalog() -> Catalog:
    """Return the plugins. One that fails is recorded, in strict mode too, so that it gets a report instead of an error."""
    from quark.errors import PluginError
    from quark.plugins.catalog import Catalog, catalog
    from quark.plugins.discovery import Settings, discover

    try:
        return catalog()
    except PluginError:
        return Catalog(discover(), attrs.evolve(Settings.from_environ(os.environ), strict=False))
