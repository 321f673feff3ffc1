"""The catalogue: every check by its id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from quark.plugins import Catalog
from quark_devkit.check import Check, CheckFailedError, NotApplicableError, NotHereError, check
from quark_devkit.expected_failures import expected_failures, refuse_unknown
from quark_devkit.extent import LAWS, OF_DISTRIBUTIONS, WHOLE_RUNS
from quark_devkit.laws import laws_of
from quark_devkit.subject import KINDS, Subject, subjects
from quark_devkit.works import WORKS

__all__ = ["all_checks", "can_be_checked", "checks_of", "subjects_of"]


@cache
def all_checks() -> Mapping[str, Check]:
    """Return all checks by id, kind by kind, in the order in which they are defined.

    The first call imports torch.
    """
    return MappingProxyType({check.id: check for kind in KINDS for check in checks_of(kind)})


@cache
def checks_of(kind: str) -> tuple[Check, ...]:
    """Return the checks of one kind of subject; the last check requires that at least one other applies.

    Checks of other kinds are not imported.
    """
    defined = tuple(_defined_in(kind))
    return (*defined, can_be_checked(kind, defined))


def can_be_checked(kind: str, checks: Sequence[Check]) -> Check:
    """Return a check that fails unless at least one required check of the kind applies to the subject."""
    slow = WHOLE_RUNS | LAWS | OF_DISTRIBUTIONS
    required = sorted((one for one in checks if one.level == "required"), key=lambda one: one.name in slow)

    @check(kind, since=2)
    def can_be_checked(subject: Subject) -> None:
        """At least one required check applies to the subject: a subject that no check has tested is not
        conformant."""
        reasons: list[NotApplicableError] = []
        for one in required:
            try:
                one.run(subject)
            except NotApplicableError as error:
                reasons.append(error)
                continue
            except (Exception, SystemExit):  # that check reports the failure itself
                return
            return
        if elsewhere := next((reason for reason in reasons if isinstance(reason, NotHereError)), None):
            raise NotApplicableError(f"none of its records can be checked on this machine: {elsewhere}")
        raise CheckFailedError(f"meets none of the {len(required)} required checks, since none applies to it: {reasons[0]}")

    return can_be_checked


def subjects_of(catalog: Catalog, distribution: str, kinds: Sequence[str], pyproject: Path | None) -> tuple[list[Subject], dict[str, str]]:
    """Return the subjects of a distribution, and the reasons of the distribution's expected failures by check
    id.

    Args:
        catalog: The plugins.
        distribution: Name of the distribution.
        kinds: Kinds of subjects; empty for all.
        pyproject: The distribution's ``pyproject.toml``; None if the file is not known.

    Raises:
        ConfigError, UnknownNameError: `quark_devkit.subject.subjects` raises the error, or an expected
            failure names an unknown check.
    """
    expected = expected_failures(pyproject)
    everything = list(subjects(catalog, distribution, kinds or KINDS, None if pyproject is None else pyproject.parent))
    if not kinds:
        refuse_unknown(expected, (f"{subject.id}:{check.name}" for subject in everything for check in checks_of(subject.kind)))
    return everything, expected


def _defined_in(kind: str) -> Iterator[Check]:
    """Yield the checks of a kind from the module or package in `quark_devkit.checks` that has the kind's
    name."""
    module = import_module(f"quark_devkit.checks.{kind}")
    parts = [module, *(import_module(f"{module.__name__}.{name}") for name in getattr(module, "PARTS", ()))]
    for part in parts:
        for value in vars(part).values():
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Check):
                    if one.kind != kind:
                        raise ValueError(f"the check {one.id} is defined in {part.__name__}, which is for checks of the kind '{kind}'")
                    yield one
    if kind in WORKS:
        yield from laws_of(kind)
