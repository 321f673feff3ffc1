"""pytest plugin: ``pytest --quark-conformance acme-quant`` runs every check of an installed distribution.

No test file is needed.

pytest imports this module in every session, so it imports nothing heavy before the option is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from quark_devkit.check import Check
    from quark_devkit.subject import Subject

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_deselected",
    "pytest_ignore_collect",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
]

_DESELECTED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("quark", "conformance of quark plugins")
    group.addoption(
        "--quark-conformance",
        action="append",
        default=[],
        metavar="DISTRIBUTION",
        help="run every conformance check of this installed distribution, and nothing else unless paths are given",
    )
    group.addoption(
        "--quark-conformance-kind",
        action="append",
        default=[],
        metavar="KIND",
        help="only subjects of this kind: format, observer, scheme, rounding, transform, block_tuning, branch, template, layout …",
    )


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave out the tests in the working directory if the option is given without paths."""
    alone = config.getoption("--quark-conformance") and config.args_source is not pytest.Config.ArgsSource.ARGS
    return True if alone else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each check of each subject."""
    for distribution in config.getoption("--quark-conformance"):
        items.extend(_items(session, distribution, config.getoption("--quark-conformance-kind")))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Record the conformance checks that ``-k``, ``-m`` or ``--deselect`` leave out."""
    for item in items:
        if isinstance(item, _ConformanceItem):
            item.config.stash.setdefault(_DESELECTED, []).append(item.name)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Make a session fail that has left checks out, since a part of the suite does not show conformance."""
    if session.config.stash.get(_DESELECTED, []) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the checks that were left out."""
    deselected = config.stash.get(_DESELECTED, [])
    if deselected:
        names = ", ".join(deselected[:5]) + (", …" if len(deselected) > 5 else "")
        terminalreporter.write_line(f"quark conformance is incomplete: {len(deselected)} checks were deselected ({names})")


def _items(session: pytest.Session, distribution: str, kinds: list[str]) -> Iterator[pytest.Item]:
    from quark.errors import QuarkError
    from quark.plugins.catalog import catalog
    from quark_devkit.catalogue import checks_of, subjects_of
    from quark_devkit.expected_failures import find_pyproject

    try:
        pyproject = find_pyproject(distribution, session.config.rootpath)
        everything, expected = subjects_of(catalog(), distribution, kinds, pyproject)
    except QuarkError as error:
        raise pytest.UsageError(str(error)) from None
    for subject in everything:
        parent = _SubjectCollector.from_parent(session, name=subject.id, path=Path(distribution), nodeid=f"{distribution}::{subject.id}")
        for check in checks_of(subject.kind):
            yield _ConformanceItem.from_parent(parent, name=check.name, subject=subject, check=check, expected=expected)


class _SubjectCollector(pytest.Collector):
    def collect(self) -> list[pytest.Item]:
        return []


class _ConformanceItem(pytest.Item):
    def __init__(self, *, subject: Subject, check: Check, expected: dict[str, str], **more: Any) -> None:
        super().__init__(**more)
        self.subject, self.check, self.expected = subject, check, expected

    def runtest(self) -> None:
        from quark_devkit.classes import raise_for
        from quark_devkit.runner import run_check

        raise_for(run_check(self.subject, self.check, self.expected.get(f"{self.subject.id}:{self.check.name}")))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from quark_devkit.check import CheckFailedError

        return str(excinfo.value) if excinfo.errisinstance(CheckFailedError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.subject.id}:{self.check.name}"
