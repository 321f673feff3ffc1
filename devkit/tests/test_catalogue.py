"""A kind without an applicable required check fails; where one applies, its outcome decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quark.plugins import ObserverRecord
from quark.plugins.catalog import catalog
from quark_devkit.catalogue import all_checks, can_be_checked, checks_of
from quark_devkit.check import Check, NotApplicableError, NotHereError
from quark_devkit.runner import is_conformant, run_check
from quark_devkit.subject import KINDS, Subject

SUBJECT = Subject("observer", "o", "acme-quant", "1", ObserverRecord(name="o", class_name="O", observer="json:dumps"), catalog())


def saying(error: BaseException | None, level: str = "required", needs: str | None = None) -> Check:
    def run(subject: Subject) -> None:
        if error is not None:
            raise error

    return Check("observer", "c", "C.", run, level, needs)


ABSENT, ADVISED = saying(NotApplicableError("it has no example")), saying(None, "advisory")
OPTIONAL = saying(None, "optional", "streaming")


@pytest.mark.parametrize("checks", [[ABSENT], [ABSENT, ABSENT, ADVISED], [OPTIONAL, ABSENT]])
def test_nothing_applicable_is_a_failure_that_says_what_is_missing(checks: list[Check]) -> None:
    result = run_check(SUBJECT, can_be_checked("observer", checks))
    assert result.outcome == "failed"
    assert result.message.endswith("since none applies to it: it has no example")


@pytest.mark.parametrize("other", [saying(None), saying(KeyError("k")), saying(SystemExit(1))])
@pytest.mark.parametrize("order", [list, reversed])
def test_one_that_is_applicable_is_enough(other: Check, order: Callable[[list[Check]], list[Check]]) -> None:
    assert run_check(SUBJECT, can_be_checked("observer", [*order([ABSENT, other])])).outcome == "passed"


def test_what_cannot_be_looked_at_on_this_machine_is_no_failure_and_alone_not_conformant() -> None:
    here = run_check(SUBJECT, can_be_checked("observer", [ABSENT, saying(NotHereError("its data are downloaded"))]))
    assert (here.outcome, here.message) == ("not applicable", "none of its records can be checked on this machine: its data are downloaded")
    assert not is_conformant([here])
    assert is_conformant([here, run_check(SUBJECT, saying(None))])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_asks_for_it_last(kind: str) -> None:
    assert checks_of(kind)[-1].name == "can_be_checked"
    assert all_checks()[f"{kind}:can_be_checked"] is checks_of(kind)[-1]
