"""Check: one requirement on a registered object, as a plain function of a `Subject`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from quark.errors import QuarkError
from quark.plugins.api_version import API_VERSION
from quark_devkit.subject import Subject

__all__ = [
    "LEVELS",
    "Check",
    "CheckFailedError",
    "NotApplicableError",
    "NotHereError",
    "assume",
    "check",
    "complaining",
    "raises",
    "require",
]

LEVELS = ("required", "optional", "advisory")
"""``required``: every subject of the kind must pass. ``optional``: only subjects that declare the capability
must pass. ``advisory``: a failure is reported but does not fail the suite; new checks start with this level.
"""


class CheckFailedError(QuarkError, AssertionError):
    """A requirement is not met; the message names the observation and the requirement."""


class NotApplicableError(QuarkError):
    """A check does not apply to this subject; the message says why."""


class NotHereError(NotApplicableError):
    """A check cannot run on this machine: it would download data, or a package is not installed."""


@attrs.frozen(eq=False)
class Check:
    """One requirement.

    Attributes:
        kind: Kind of the subjects: ``"format"``, ``"rounding"``, ``"distribution"`` …
        name: Name of the check's function, unique within its kind.
        sentence: The requirement: the first paragraph of the function's docstring.
        run: Raises `CheckFailedError` if a subject does not meet the requirement, and `NotApplicableError` if
            the requirement does not apply to the subject. Any other exception is a failure too.
        level: One of `LEVELS`.
        needs: Capability that an optional check needs; None for other checks.
        since: Version of the plugin API that added the check.
    """

    kind: str
    name: str
    sentence: str
    run: Callable[[Subject], None]
    level: str = attrs.field(default="required", validator=attrs.validators.in_(LEVELS))
    needs: str | None = None
    since: int = API_VERSION

    def __attrs_post_init__(self) -> None:
        if (self.level == "optional") != (self.needs is not None):
            raise ValueError(f"{self.id}: an optional check must name the capability that it needs, and other checks must not")

    @property
    def id(self) -> str:
        """Kind and name: ``"format:saturates"``."""
        return f"{self.kind}:{self.name}"


def check(
    kind: str, *, each: Callable[[Subject], Iterable[Any]] | None = None, level: str = "required", needs: str | None = None, since: int = 1
) -> Callable[[Callable[[Any], None]], Check]:
    """Return a decorator that turns a function into a `Check`; the docstring of the function must begin with
    the requirement.

    Args:
        kind: As `Check.kind`.
        each: Yields the cases of a subject, such as a spec of each granularity. The function then gets each
            case instead of the subject, and failures name the case.
        level: As `Check.level`.
        needs: As `Check.needs`.
        since: As `Check.since`.

    Example:
        >>> @check("observer")
        ... def has_a_name(subject):
        ...     '''The observer has a name.'''
        ...     require(bool(subject.name), "has no name")
        >>> has_a_name.id, has_a_name.sentence
        ('observer:has_a_name', 'The observer has a name.')
    """

    def make(function: Callable[[Any], None]) -> Check:
        paragraph = (function.__doc__ or "").strip().partition("\n\n")[0]
        sentence = " ".join(paragraph.split())
        if not sentence.endswith("."):
            raise ValueError(f"the docstring of the check '{function.__name__}' must begin with the requirement, as one sentence")

        def run_each(subject: Subject) -> None:
            assert each is not None
            for case in each(subject):
                try:
                    function(case)
                except CheckFailedError as error:
                    raise CheckFailedError(f"{error} ({case})") from error

        return Check(kind, function.__name__, sentence, function if each is None else run_each, level, needs, since)

    return make


def require(condition: object, message: str) -> None:
    """Raise `CheckFailedError` with the message unless the condition holds.

    Args:
        condition: Anything with a truth value.
        message: A predicate about the subject: the observation and the requirement.
    """
    if not condition:
        raise CheckFailedError(message)


def raises(errors: type[Exception] | tuple[type[Exception], ...], function: Callable[..., Any], *args: Any, **named: Any) -> bool:
    """Return whether a call raises one of these errors."""
    try:
        function(*args, **named)
    except errors:
        return True
    return False


@contextmanager
def complaining(complaint: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise `CheckFailedError` with the complaint and the error's text if the body raises one of the errors.

    Args:
        complaint: A predicate about the subject, such as ``"refuses its own defaults"``.
        *errors: Classes of errors.
    """
    try:
        yield
    except errors as error:
        raise CheckFailedError(f"{complaint}: {error}") from error


def assume(condition: object, reason: str) -> None:
    """Raise `NotApplicableError` with the reason unless the condition holds.

    Args:
        condition: Anything with a truth value.
        reason: A clause about the subject: why the check does not apply.
    """
    if not condition:
        raise NotApplicableError(reason)
