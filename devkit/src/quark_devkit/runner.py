"""Runs checks, each with its own random state, so that outcomes are independent."""

from __future__ import annotations

import logging
import random
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import torch

from quark.base.log import silenced
from quark.errors import QuarkError
from quark.plugins import using
from quark_devkit.check import Check, CheckFailedError, NotApplicableError
from quark_devkit.subject import Subject
from quark_devkit.threads import threads

__all__ = ["OUTCOMES", "Result", "is_conformant", "quietly", "run_check", "run_checks"]

OUTCOMES = {
    "passed": "the requirement is met",
    "failed": "the requirement is not met",
    "advised": "the requirement is not met, but the check is only advisory",
    "expected": "the requirement is not met, and the author's pyproject.toml declares this failure with a reason",
    "unexpected": "the requirement is met, but the author's pyproject.toml declares a failure",
    "not applicable": "the check does not apply to this subject",
}
"""Possible outcomes of a check, with their meaning."""
_FAILURES = {"failed", "unexpected"}


@attrs.frozen
class Result:
    """The outcome of one check of one subject.

    Attributes:
        subject: The subject.
        check: The check.
        outcome: One of `OUTCOMES`.
        message: The observation and the requirement. For an expected failure and for a check that does not
            apply, the reason. Empty if the check passed.
        seconds: Duration in seconds.
        details: Traceback of an exception that is not a `quark.errors.QuarkError`; else empty.
    """

    subject: Subject
    check: Check
    outcome: str
    message: str = ""
    seconds: float = 0.0
    details: str = ""

    @property
    def id(self) -> str:
        """The subject's id and the check's name: ``"scheme:acme_int3:export_reloads"``."""
        return f"{self.subject.id}:{self.check.name}"

    @property
    def is_failure(self) -> bool:
        """Whether the result makes the subject non-conformant."""
        return self.outcome in _FAILURES


def run_checks(subject: Subject, checks: Iterable[Check], expected: Mapping[str, str] | None = None) -> Iterator[Result]:
    """Run checks on a subject, one after the other. Yield each result as soon as the check has ended.

    Args:
        subject: A subject of the kind that the checks are for.
        checks: The checks.
        expected: Reasons of expected failures by `Result.id`.
    """
    for check in checks:
        yield run_check(subject, check, (expected or {}).get(f"{subject.id}:{check.name}"))


def run_check(subject: Subject, check: Check, reason: str | None = None) -> Result:
    """Run one check on one subject.

    Args:
        subject: The subject.
        check: A check for subjects of the subject's kind.
        reason: Why the check is expected to fail; None if it is expected to pass.
    """
    begin = time.perf_counter()
    outcome, message, details = _outcome(subject, check)
    if reason is not None:
        if outcome in ("failed", "advised"):
            outcome, message, details = "expected", reason, message
        elif outcome == "passed":
            outcome = "unexpected"
            message = f"passes, but is declared as an expected failure ({reason}): remove the entry from pyproject.toml"
    return Result(subject, check, outcome, message, time.perf_counter() - begin, details)


def is_conformant(results: Sequence[Result]) -> bool:
    """Return whether no check failed, except failures that are declared, and at least one check passed or
    failed as declared."""
    return any(result.outcome in ("passed", "expected") for result in results) and not any(result.is_failure for result in results)


def _outcome(subject: Subject, check: Check) -> tuple[str, str, str]:
    """Run a check, and return the outcome, the message and the details. Expected failures are not
    considered."""
    if check.needs is not None and not subject.declares(check.needs):
        return "not applicable", f"the record does not declare the capability '{check.needs}'", ""
    failed = "advised" if check.level == "advisory" else "failed"
    python_state = random.getstate()
    try:
        with using(subject.catalog), torch.random.fork_rng(devices=[]), warnings.catch_warnings(), quietly(), threads(1):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            check.run(subject)
    except NotApplicableError as error:
        return "not applicable", str(error), ""
    except CheckFailedError as error:
        return failed, str(error), ""
    except QuarkError as error:
        return failed, f"raises {type(error).__name__}: {error}", ""
    except (Exception, SystemExit) as error:  # an error of a plugin must not end the report on it
        return failed, f"raises {type(error).__name__}: {error}", traceback.format_exc()
    finally:
        random.setstate(python_state)
    return "passed", "", ""


@contextmanager
def quietly() -> Iterator[None]:
    """Hide the logs of the pipeline and the progress bars of loading and saving."""
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with silenced(logging.CRITICAL):
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
